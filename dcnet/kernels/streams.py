"""Work beside the main stream: small kernels and passes over memory hide behind convolutions that do not need them."""

from __future__ import annotations

import functools
from types import TracebackType

import torch


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def raw_stream(device: torch.device) -> int | None:
    """The current stream as kernels are launched on it."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Beside:
    """Launches what is inside the `with` on a side stream, after all that came before; `join` waits for it.

    Only while a CUDA graph is captured: there a fork costs nothing, otherwise it takes the host longer than it saves
    the GPU. The side stream goes first, since what runs on it is short and others wait for it. Every fork is joined
    before its tensors are given up, so that memory freed after it may be used by anyone.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.side = _side_stream(device.index) if capturing(device) else None
        self.main: torch.cuda.Stream | None = None

    def __enter__(self) -> Beside:
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
        """A point on the side stream that the main one can wait for with `wait`."""
        return None if self.side is None else self.side.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None and self.main is not None:
            self.main.wait_event(mark)
