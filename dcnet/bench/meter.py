"""Measures time, memory and kernel launches of a call; the meter of the CPU."""

import contextlib
import ctypes
import functools
import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet import bench
from dcnet.bench.shapes import Ceilings

# A stopwatch measures one call, and returns milliseconds.
Stopwatch = Callable[[], float]


def time_rounds(
    stopwatches: Mapping[str, Stopwatch], warmup: int, repeats: int, after_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Reads every stopwatch once per round, starting with another one in each round, and drops warmup rounds."""
    names = list(stopwatches)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warmup + repeats):
        first = i % max(len(names), 1)
        for name in [*names[first:], *names[:first]]:
            times[name].append(stopwatches[name]())
        after_round()
    return {name: taken[warmup:] for name, taken in times.items()}


def summarize(times: Mapping[str, Sequence[float]], bases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Median and quartiles of times, the ratio of the median to that of the base, and quartiles of per-round ratios."""
    quartiles = functools.partial(statistics.quantiles, n=4, method="inclusive")
    results = {}
    for name, taken in times.items():
        low, median, high = quartiles(taken)
        base = times[bases[name]]
        ratio_low, _, ratio_high = quartiles([own / other for own, other in zip(taken, base, strict=True)])
        results[name] = {
            "ms": median,
            "ms_quartiles": [low, high],
            "ratio": median / statistics.median(base),
            "ratio_quartiles": [ratio_low, ratio_high],
        }
    return results


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean; None if a ratio is unknown."""
    given = list(ratios)
    known = [ratio for ratio in given if ratio is not None]
    return statistics.geometric_mean(known) if known and len(known) == len(given) else None


Call = Callable[[], object]
MIB, GIB = 2**20, 2**30
STATUS, INFO, REFERENCES = (Path("/proc", name) for name in ("self/status", "meminfo", "self/clear_refs"))


@dataclass(frozen=True)
class Clock:
    """A way to time calls; `prefix` starts the names of its entries in a record."""

    prefix: str
    start: Callable[[Call], Stopwatch]
    most_rounds: int | None = None

    def rounds(self, warmup: int, repeats: int) -> tuple[int, int]:
        """Warmup and measured rounds; fewer than requested if one round makes many calls."""
        return (warmup, repeats) if self.most_rounds is None else (min(warmup, 1), min(repeats, self.most_rounds))


class Meter(ABC):
    """Measures calls on one type of device.

    Attributes:
        device: "cpu" or "cuda".
        memory_name: the entry of a record for `memory_mib`.
        usable_share: the share of the free memory that a head may use.
        copied_bytes: the size of the copy that measures the bandwidth.
        matrix_side: the side of the matrices whose product measures the compute speed.
    """

    device: ClassVar[str]
    memory_name: ClassVar[str]
    usable_share: ClassVar[float] = 1.0
    copied_bytes: ClassVar[int]
    matrix_side: ClassVar[int]

    @property
    @abstractmethod
    def clocks(self) -> tuple[Clock, ...]:
        """All clocks, the main one first."""

    @property
    def host_clock(self) -> Clock:
        """Times calls launched from the host."""
        return self.clocks[0]

    @property
    def call_clock(self) -> Clock:
        """Times single calls, without extra warmup calls."""
        return self.clocks[0]

    @abstractmethod
    def memory_mib(self, forward: Call, training: Call) -> float:
        """The memory that a record stores as `memory_name`."""

    def launches(self, call: Call) -> int | None:
        """The number of kernel launches, if the device has any."""
        return None

    def allocated_mib(self) -> float:
        """Allocated device memory; 0 if unknown."""
        return 0.0

    @abstractmethod
    def free(self) -> None:
        """Returns unused memory to the device or the system."""

    @abstractmethod
    def free_bytes(self) -> float:
        """Free memory of the device; infinite if unknown."""

    @abstractmethod
    def held_bytes(self) -> int | None:
        """Memory that this process holds on the device; None if unknown."""

    @abstractmethod
    def peak_bytes(self, call: Call) -> int | None:
        """The largest `held_bytes` during one call; None if unknown."""

    def ceilings(self, dtype: torch.dtype, tries: int = 10) -> Ceilings:
        """Peak speeds: bytes read and written per second in a large copy, operations per second in a large product."""
        source = torch.zeros(self.copied_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        copying = self._best(lambda: target.copy_(source), tries)
        rates = [1000 * flops / self._best(call, tries) for flops, call in self.products(dtype)]
        return Ceilings(1000 * 2 * self.copied_bytes / copying, max(rates))

    def products(self, dtype: torch.dtype) -> list[tuple[int, Call]]:
        """Calls at peak compute speed, each with its floating-point operations."""
        side = self.matrix_side
        matrix = torch.randn(side, side, device=self.device).to(dtype)
        product = torch.empty_like(matrix)
        return [(2 * side**3, lambda: torch.mm(matrix, matrix, out=product))]

    def _best(self, call: Call, tries: int) -> float:
        stopwatch = self.clocks[0].start(call)
        return min(stopwatch() for _ in range(tries))


class Cpu(Meter):
    """Wall time, and the memory that the forward pass keeps for the backward pass."""

    device = "cpu"
    memory_name = "kept_mib"
    # The system may kill a process that takes all memory, and other processes need some.
    usable_share = 0.9
    copied_bytes = 64 * MIB
    matrix_side = 1024

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return (Clock("", wall_time),)

    def memory_mib(self, forward: Call, training: Call) -> float:
        return kept_mib(forward)

    def products(self, dtype: torch.dtype) -> list[tuple[int, Call]]:
        """Adds a convolution, which uses another library that is faster on some processors."""
        images = torch.randn(8, 256, 16, 16).to(dtype).to(memory_format=torch.channels_last)
        filters = torch.randn(256, 256, 3, 3).to(dtype).to(memory_format=torch.channels_last)
        flops = 2 * images.numel() * 256 * 9
        return [*super().products(dtype), (flops, lambda: F.conv2d(images, filters, padding=1))]

    def free(self) -> None:
        gc.collect()
        # Otherwise the process keeps freed small blocks, and the next peak would not include them.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)

    def free_bytes(self) -> float:
        return _entry(INFO, "MemAvailable") or math.inf

    def held_bytes(self) -> int | None:
        return _entry(STATUS, "VmRSS")

    def peak_bytes(self, call: Call) -> int | None:
        self.free()
        try:
            # Writing 5 resets the high-water mark.
            REFERENCES.write_text("5", encoding="utf-8")
        except OSError:
            return None
        call()
        return _entry(STATUS, "VmHWM")


def wall_time(call: Call) -> Stopwatch:
    def read() -> float:
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)

    return read


def kept_mib(forward: Call) -> float:
    """MiB that the forward pass keeps for the backward pass, including input and filters."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Keep the output alive: otherwise its memory is freed and reused.
        _output = forward()
    return sum(kept.values()) / MIB


def default_threads(device: str) -> int:
    """The default number of threads: 2 on a CPU, so that machines are comparable; torch's default on a GPU."""
    return 2 if device == "cpu" else torch.get_num_threads()


def meter_of(device: str) -> Meter:
    """The meter of `cpu` or `cuda`."""
    return Cpu() if device == "cpu" else bench.cuda_meter.Cuda()


def out_of_memory(error: Exception) -> bool:
    """True if the call ran out of memory; on a CPU torch reports it only in the message."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _entry(file: Path, name: str) -> int | None:
    """An entry of a file in /proc, converted from kB to bytes."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
