"""Clamping with slope 1 at the limits themselves, in every version of torch.

From torch 2.15 on the gradient of `clamp` is 0 at its limits, where it was 1 before. Cosines of -1 and 1, and norms
equal to the radius, are at such a limit. `torch.minimum` and `torch.maximum` would halve the slope there."""

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether torch.jit is tracing."""
    return torch._C._get_tracing_state() is not None


def at_most(x: Tensor, limit: float) -> Tensor:
    """min(x, limit); NaN stays NaN."""
    # Without a gradient the slope does not matter, and clamp takes one pass instead of two.
    needs_slope = x.requires_grad and torch._C._get_tracing_state() is None
    return torch.where(x > limit, limit, x) if needs_slope else x.clamp(max=limit)


def at_least(x: Tensor, limit: float) -> Tensor:
    """max(x, limit); NaN stays NaN."""
    needs_slope = x.requires_grad and torch._C._get_tracing_state() is None
    return torch.where(x < limit, limit, x) if needs_slope else x.clamp(min=limit)


def between(x: Tensor, low: float, high: float) -> Tensor:
    """x clamped to [low, high]; NaN stays NaN."""
    needs_slope = x.requires_grad and torch._C._get_tracing_state() is None
    return at_most(at_least(x, low), high) if needs_slope else x.clamp(low, high)
