"""Small tensors that live and die together share one allocation: on the host each takes longer than on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

# Every place begins at a multiple of 128 bytes.
_STEP = 32


class Place:
    """Some of the floats of a buffer, known to kernels by their address, and a tensor only where one is asked for."""

    __slots__ = ("address", "buffer", "size", "start")

    def __init__(self, buffer: Tensor, address: int, start: int, size: int):
        self.buffer, self.address, self.start, self.size = buffer, address, start, size

    def tensor(self) -> Tensor:
        return self.buffer[self.start : self.start + self.size]


class Memory:
    """A plan of a buffer: which floats belong to whom."""

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
