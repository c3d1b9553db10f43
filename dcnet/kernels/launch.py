"""Kernel launches with little host time: precompiled arguments, one buffer for small tensors, and a side stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dcnet.device_functions import INTERPRETED, triton

# Every place starts at a multiple of this many floats, so that it is aligned to 128 bytes.
_STEP = 32


class Place:
    """A range of floats in a buffer. Kernels get its address; a tensor is made only on request."""

    __slots__ = ("address", "buffer", "size", "start")

    def __init__(self, buffer: Tensor, address: int, start: int, size: int):
        self.buffer, self.address, self.start, self.size = buffer, address, start, size

    def tensor(self) -> Tensor:
        return self.buffer[self.start : self.start + self.size]


class Memory:
    """The layout of a buffer that holds several float tensors."""

    def __init__(self, *sizes: int):
        self.spans: list[tuple[int, int]] = []
        self.total = 0
        for size in sizes:
            self.spans.append((self.total, size))
            self.total += -(-size // _STEP) * _STEP
        # In bytes.
        self.offsets = [4 * start for start, _ in self.spans]

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.total, dtype=torch.float32, device=device)

    def places(self, buffer: Tensor) -> list[Place]:
        address = buffer.data_ptr()
        if address % 16:
            # Hooks of saved tensors may have moved the buffer into another one.
            return self.places(buffer.clone())
        return [Place(buffer, address + 4 * start, start, size) for start, size in self.spans]


class Launch:
    """One kernel for one convolution, with its grid, numbers and compile-time flags.

    Triton inspects every argument of every call to find the compiled variant. Here only addresses change between
    calls, so the variant compiled by the first call is kept and run directly, without hooks. Addresses that are not
    multiples of 16 need another variant and go through Triton; `aligned` says that there are none. Once there is a
    `runner`, `direct` takes addresses in place of all tensors, which needs less time.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], numbers: Sequence[float], warps: int, **flags: Any):
        self.kernel, self.warps = kernel, warps
        self.flags = {name: flags[name] for name in kernel.arg_names if name in flags}
        self.numbers, self.rest = tuple(numbers), (*numbers, *self.flags.values())
        self.grid = (*grid, *(1,) * (3 - len(grid)))
        self.runner: Any = None

    def __call__(self, *given: Any, stream: int | None, aligned: bool) -> None:
        if self.runner is not None and aligned:
            # In one expression for the most frequent kind, since host time is the limit of small layers.
            self.direct(stream, *[g.address if type(g) is Place else address_of(g) for g in given])
            return
        tensors = [g.tensor() if type(g) is Place else g for g in given]
        compiled = self.kernel[self.grid](*tensors, *self.numbers, num_warps=self.warps, **self.flags)
        if aligned and not INTERPRETED:
            self.runner = _runner(compiled)

    def direct(self, stream: int | None, *addresses: Any) -> None:
        """Runs the compiled kernel; there must be a runner, and all addresses must be aligned."""
        run, fixed, in_tuple = self.runner
        if in_tuple:
            run(*self.grid, stream, *fixed, (*addresses, *self.rest))
        else:
            run(*self.grid, stream, *fixed, *addresses, *self.rest)


def _runner(compiled: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """A function that launches a compiled kernel, its arguments after the stream, and whether the rest is one tuple.

    Triton's own runner also calls this, after it has prepared metadata for the hooks of profilers. The launcher inside
    of the runner needs less time; its arguments depend on the version of Triton.
    """
    run, none = compiled.run, (None, None, None)
    version = ".".join(triton.__version__.split(".")[:2])
    known = version in ("3.6", "3.7") and hasattr(run, "launch_pdl")
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return run, (compiled.function, compiled.packed_metadata, *none), False
    flags, scratch = (compiled.function, run.launch_cooperative_grid, run.launch_pdl), (None, None)
    if version == "3.6":
        return run.launch, (*flags, *scratch, compiled.packed_metadata, *none), False
    signature = (run.arg_annotations, run.kernel_signature)
    return run.launch, (*flags, compiled.packed_metadata, *none, *scratch, *signature), True


def address_of(given: Any) -> Any:
    """The address of a tensor or place, or of each in a tuple; numbers stay the same."""
    if isinstance(given, Tensor):
        return given.data_ptr()
    if type(given) is tuple:
        return tuple([address_of(each) for each in given])
    return given.address if type(given) is Place else given


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16, which holds for newly allocated tensors."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def kinds_of(*tensors: Tensor | None) -> tuple[tuple[torch.dtype, torch.device] | None, ...]:
    """Dtype and device of every tensor: what a launch by addresses cannot check."""
    return tuple([None if tensor is None else (tensor.dtype, tensor.device) for tensor in tensors])


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def raw_stream(device: torch.device) -> int | None:
    """The handle of the current CUDA stream, None on a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def direct_stream(device: torch.device) -> int | None:
    """The current stream of the device; None if another GPU is the current one, or if a graph is being captured."""
    if device.type != "cuda":
        return 0
    if torch._C._cuda_getDevice() != device.index or torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


_NO_GUARD = contextlib.nullcontext()


def device_guard(x: Tensor) -> Any:
    """Makes the GPU of the tensor the current one; does nothing if it is, and for other tensors."""
    device = x.device
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NO_GUARD
    return torch.cuda._DeviceGuard(device.index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class SideStream:
    """Launches the body of the `with` on a side stream, after all earlier work; `join` waits for it.

    `side_stream` forks only while a CUDA graph is captured: there a fork is cheap, otherwise it costs more host time
    than it saves GPU time. The side stream has priority, since its kernels are short and others wait for them. Every
    fork is joined before its tensors are released, so their memory can be reused safely.
    """

    def __init__(self, device: torch.device | None):
        """None for the stream that never forks."""
        self.device = device
        self.side = None if device is None else _side_stream(device.index)
        self.main: torch.cuda.Stream | None = None

    def __enter__(self) -> SideStream:
        if self.side is not None:
            self.main = torch.cuda.current_stream(self.device)
            self.side.wait_stream(self.main)
            torch.cuda.set_stream(self.side)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.main is not None:
            torch.cuda.set_stream(self.main)

    def join(self) -> None:
        if self.main is not None and self.side is not None:
            self.main.wait_stream(self.side)

    def mark(self) -> torch.cuda.Event | None:
        """Records an event on the side stream, for `wait`, which makes the main stream wait for it."""
        return None if self.side is None else self.side.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None and self.main is not None:
            self.main.wait_event(mark)


NO_FORK = SideStream(None)


def side_stream(device: torch.device) -> SideStream:
    """A side stream that forks if a CUDA graph is being captured."""
    return SideStream(device) if capturing(device) else NO_FORK
