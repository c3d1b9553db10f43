"""Limits whose slope at the limit itself is that of the values within, whatever the version of torch.

From torch 2.15 on the gradient of `clamp` is 0 at its limits, where it was 1 before. Cosines of -1 and 1 and norms at
the radius are such limits. `torch.minimum` and `torch.maximum` would halve the slope there.
"""

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether torch.jit traces."""
    return torch._C._get_tracing_state() is not None


def passes_gradient(x: Tensor) -> bool:
    """Whether slopes matter: a gradient may come back to x. What torch.jit traces is the same with one and without."""
    return x.requires_grad and not is_traced()


def at_most(x: Tensor, limit: float) -> Tensor:
    """min(x, limit); NaN stays NaN."""
    # Without a gradient to pass on there is no slope, and clamp takes one pass where the others take two.
    return torch.where(x > limit, limit, x) if passes_gradient(x) else x.clamp(max=limit)


def at_least(x: Tensor, limit: float) -> Tensor:
    """max(x, limit); NaN stays NaN."""
    return torch.where(x < limit, limit, x) if passes_gradient(x) else x.clamp(min=limit)


def between(x: Tensor, low: float, high: float) -> Tensor:
    """x, but not below `low` and not above `high`; NaN stays NaN."""
    return at_most(at_least(x, low), high) if passes_gradient(x) else x.clamp(low, high)
