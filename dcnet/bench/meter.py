"""What a device can tell of a call: its time, its memory, its launches."""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.bench.shapes import Ceilings
from dcnet.bench.timing import Stopwatch

Call = Callable[[], object]
MIB = 2**20


@dataclass(frozen=True)
class Clock:
    """One way to take the time of a call; `prefix` tells its entries in a record from those of the others."""

    prefix: str
    start: Callable[[Call], Stopwatch]
    most_rounds: int | None = None

    def rounds(self, warmup: int, repeats: int) -> tuple[int, int]:
        """The rounds of the warmup and those that count: fewer than are asked for, if each of them is many calls."""
        return (warmup, repeats) if self.most_rounds is None else (min(warmup, 1), min(repeats, self.most_rounds))


class Meter(ABC):
    """Measures calls on one kind of device."""

    device: ClassVar[str]
    memory_name: ClassVar[str]
    copied_bytes: ClassVar[int]
    matrix_side: ClassVar[int]

    @property
    @abstractmethod
    def clocks(self) -> tuple[Clock, ...]:
        """The ways to take times, of which the first one counts."""

    @property
    def host_clock(self) -> Clock:
        """The clock of calls as the host makes them, one by one."""
        return self.clocks[0]

    @property
    def call_clock(self) -> Clock:
        """The clock of single calls, of which none is made but those that are asked for."""
        return self.clocks[0]

    @abstractmethod
    def memory_mib(self, forward: Call, training: Call) -> float:
        """What a record holds by `memory_name`."""

    def launches(self, call: Call) -> int | None:
        """How often the call asks the device to do something, where that is a cost."""
        return None

    def allocated_mib(self) -> float:
        """What is taken of the device's memory, where that is known."""
        return 0.0

    def free(self) -> None:
        """Gives back what is no longer used."""
        gc.collect()

    def ceilings(self, dtype: torch.dtype, tries: int = 10) -> Ceilings:
        """The bytes a second of a large copy, read and written, and the operations a second of a large product."""
        source = torch.zeros(self.copied_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        copying = self._best(lambda: target.copy_(source), tries)
        rates = [1000 * flops / self._best(call, tries) for flops, call in self.products(dtype)]
        return Ceilings(1000 * 2 * self.copied_bytes / copying, max(rates))

    def products(self, dtype: torch.dtype) -> list[tuple[int, Call]]:
        """Calls that compute as fast as the device can, each with its floating-point operations."""
        side = self.matrix_side
        matrix = torch.randn(side, side, device=self.device).to(dtype)
        product = torch.empty_like(matrix)
        return [(2 * side**3, lambda: torch.mm(matrix, matrix, out=product))]

    def _best(self, call: Call, tries: int) -> float:
        stopwatch = self.clocks[0].start(call)
        return min(stopwatch() for _ in range(tries))


class Cpu(Meter):
    """Wall times, and what the forward pass keeps for the backward pass."""

    device = "cpu"
    memory_name = "kept_mib"
    copied_bytes = 64 * MIB
    matrix_side = 1024

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return (Clock("", wall_time),)

    def memory_mib(self, forward: Call, training: Call) -> float:
        return kept_mib(forward)

    def products(self, dtype: torch.dtype) -> list[tuple[int, Call]]:
        """Convolutions come from another library than products of matrices, which is faster on some processors."""
        images = torch.randn(8, 256, 16, 16).to(dtype).to(memory_format=torch.channels_last)
        filters = torch.randn(256, 256, 3, 3).to(dtype).to(memory_format=torch.channels_last)
        flops = 2 * images.numel() * 256 * 9
        return [*super().products(dtype), (flops, lambda: F.conv2d(images, filters, padding=1))]


def wall_time(call: Call) -> Stopwatch:
    def read() -> float:
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)

    return read


def kept_mib(forward: Call) -> float:
    """The MiB that the forward pass leaves for the backward pass, input and filters included."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Held to the end, or what it keeps would be freed and its place used again.
        _output = forward()
    return sum(kept.values()) / MIB


def meter_of(device: str) -> Meter:
    """The meter of `cpu` or `cuda`."""
    if device == "cpu":
        return Cpu()
    # Setting a GPU up takes time, and is of no use elsewhere.
    from dcnet.bench.cuda import Cuda

    return Cuda()
