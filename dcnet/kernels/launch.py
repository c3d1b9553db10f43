"""A kernel with all that stays the same from call to call, so that a call costs as little as it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.device import INTERPRETED
from dcnet.kernels.memory import Place


class Launch:
    """One kernel for one convolution: its grid, its numbers and its flags.

    Triton looks at every argument of every call to find the variant that it compiled. Here only addresses change from
    call to call; so what the first call compiled is kept, and run directly. Addresses that are not multiples of 16 need
    another variant, and go the long way: `aligned` says whether there are none.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], numbers: Sequence[float], warps: int, **flags: Any):
        self.kernel, self.warps = kernel, warps
        self.flags = {name: flags[name] for name in kernel.arg_names if name in flags}
        self.numbers, self.rest = tuple(numbers), (*numbers, *self.flags.values())
        self.grid = (*grid, *(1,) * (3 - len(grid)))
        self.runner: Any = None

    def __call__(self, *given: Any, stream: int | None, aligned: bool) -> None:
        if self.runner is not None and aligned:
            self.runner(*[g.address if type(g) is Place else g for g in given], *self.rest, stream=stream)
            return
        tensors = [g.tensor() if type(g) is Place else g for g in given]
        compiled = self.kernel[self.grid](*tensors, *self.numbers, num_warps=self.warps, **self.flags)
        if aligned and not INTERPRETED:
            self.runner = compiled[self.grid]


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16, as those of whole tensors are."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
