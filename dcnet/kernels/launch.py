"""Kernel launches with little host time: precompiled arguments, one buffer for small tensors, and a side stream."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dcnet.device_functions import INTERPRETED

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

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.total, dtype=torch.float32, device=device)

    def places(self, buffer: Tensor) -> list[Place]:
        address = buffer.data_ptr()
        return [Place(buffer, address + 4 * start, start, size) for start, size in self.spans]


class Launch:
    """One kernel for one convolution, with its grid, numbers and compile-time flags.

    Triton inspects every argument of every call to find the compiled variant. Here only addresses change between
    calls, so the variant compiled by the first call is kept and run directly, without hooks. Addresses that are not
    multiples of 16 need another variant and go through Triton; `aligned` says that there are none.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], numbers: Sequence[float], warps: int, **flags: Any):
        self.kernel, self.warps = kernel, warps
        self.flags = {name: flags[name] for name in kernel.arg_names if name in flags}
        self.numbers, self.rest = tuple(numbers), (*numbers, *self.flags.values())
        self.grid = (*grid, *(1,) * (3 - len(grid)))
        self.runner: Any = None

    def __call__(self, *given: Any, stream: int | None, aligned: bool) -> None:
        if self.runner is not None and aligned:
            run, *fixed = self.runner
            run(*self.grid, stream, *fixed, *[g.address if type(g) is Place else g for g in given], *self.rest)
            return
        tensors = [g.tensor() if type(g) is Place else g for g in given]
        compiled = self.kernel[self.grid](*tensors, *self.numbers, num_warps=self.warps, **self.flags)
        if aligned and not INTERPRETED:
            # Triton's own runner calls this, too, after it has prepared metadata for the hooks of profilers.
            self.runner = (compiled.run, compiled.function, compiled.packed_metadata, None, None, None)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16, which holds for newly allocated tensors."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


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


def device_guard(x: Tensor) -> Any:
    """Makes the GPU of the tensor the current one; does nothing for other tensors."""
    return torch.cuda._DeviceGuard(x.device.index if x.is_cuda else -1)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class SideStream:
    """Launches the body of the `with` on a side stream, after all earlier work; `join` waits for it.

    It forks only while a CUDA graph is captured: there a fork is cheap, otherwise it costs more host time than it saves
    GPU time. The side stream has priority, since its kernels are short and others wait for them. Every fork is joined
    before its tensors are released, so their memory can be reused safely.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.side = _side_stream(device.index) if capturing(device) else None
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
