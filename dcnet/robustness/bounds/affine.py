"""Plain layers: what goes in, times a matrix, plus a bias."""

import math

import torch
from torch import Tensor

from dcnet.robustness.bounds.matrices import SLACK
from dcnet.robustness.bounds.signal import Signal
from dcnet.robustness.bounds.window import Window


def affine(signal: Signal, weight: Tensor, bias: Tensor | None, window: Window) -> Signal:
    """A convolution or fully connected layer with filters [out, channels of a group, *kernel] in float64."""
    filters = len(weight)
    sums = _tap_sums(weight.abs())
    rows = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    moved = (sums * window.per_filter(signal.linf, filters)).sum(1)
    low, high = _interval(signal, weight, bias, window)
    return Signal(
        (filters, *window.outputs),
        torch.minimum(moved, rows * signal.l2 * window.lengthened) * SLACK,
        low,
        high,
        lambda scale: signal.l2 * window.norm(weight * scale.view(-1, *[1] * (weight.dim() - 1))),
        None if window.sides else lambda: _differences(signal, weight),
    )


def with_zeros(signal: Signal, window: Window) -> tuple[Tensor, Tensor]:
    """Between which the values lie, and the padding as well."""
    if not window.zeros:
        return signal.low, signal.high
    return signal.low.clamp(max=0), signal.high.clamp(min=0)


def _tap_sums(weight: Tensor) -> Tensor:
    return weight.flatten(2).sum(2) if weight.dim() > 2 else weight


def _interval(signal: Signal, weight: Tensor, bias: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
    low, high = with_zeros(signal, window)
    offset = weight.new_zeros(len(weight)) if bias is None else bias
    if not signal.bounded:
        return torch.full_like(offset, -math.inf), torch.full_like(offset, math.inf)
    up, down = _tap_sums(weight.clamp(min=0)), _tap_sums(weight.clamp(max=0))
    lows, highs = window.per_filter(low, len(weight)), window.per_filter(high, len(weight))
    return (up * lows + down * highs).sum(1) + offset, (up * highs + down * lows).sum(1) + offset


def _differences(signal: Signal, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the difference of two outputs, whose filter is the difference of two filters."""
    together = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist") * signal.l2
    moved, width = weight * signal.moved, weight * signal.width
    lipschitz = torch.minimum(together, torch.cdist(moved, moved, p=1)) * SLACK
    spread = torch.cdist(width, width, p=1) * SLACK if signal.bounded else torch.full_like(lipschitz, math.inf)
    return lipschitz, spread
