"""Pooling: a largest value or a mean is moved no farther than the values it is taken of."""

import math
from typing import Any

import torch
from torch import nn

from dcnet.robustness.bounds.layers import register
from dcnet.robustness.bounds.matrices import overlap
from dcnet.robustness.bounds.signal import Signal, together


@register(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _largest(pool: Any, signal: Signal) -> Signal:
    """|max a - max b| <= max |a - b|, and each value is in so many windows at most."""
    sides = len(signal.shape) - 1
    kernel, stride, dilation = (_each(size, sides) for size in (pool.kernel_size, pool.stride, pool.dilation))
    return _pooled(signal, _outputs(pool, signal), signal.l2 * math.sqrt(overlap(kernel, stride, dilation)))


@register(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def _adaptive_largest(pool: Any, signal: Signal) -> Signal:
    outputs = _outputs(pool, signal)
    if any(side % size for side, size in zip(signal.shape[1:], outputs, strict=True)):
        raise ValueError(f"makes {list(outputs)} of {list(signal.shape[1:])}, for which its windows overlap")
    return _pooled(signal, outputs, signal.l2)


@register(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
@register(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _mean(pool: Any, signal: Signal) -> Signal:
    """By Schur's test: the largest sum of a row of its matrix, which is 1 at most, times the largest of a column."""
    if getattr(pool, "divisor_override", None) is not None:
        raise ValueError("divides by a number of its own")
    outputs = _outputs(pool, signal)
    with torch.enable_grad():
        ones = torch.ones(1, *signal.shape[1:], dtype=torch.float64, requires_grad=True)
        (columns,) = torch.autograd.grad(pool(ones).sum(), ones)
    pooled = _pooled(signal, outputs, signal.l2 * math.sqrt(float(columns.max())))
    padded = any(_each(getattr(pool, "padding", 0), len(outputs)))
    return _with_zero(pooled) if padded else pooled


def _pooled(signal: Signal, outputs: tuple[int, ...], l2: float) -> Signal:
    return Signal((signal.channels, *outputs), signal.linf, signal.low, signal.high, together(l2))


def _with_zero(signal: Signal) -> Signal:
    """Means that count padding lie between zero and what they would be."""
    low, high = signal.low.clamp(max=0), signal.high.clamp(min=0)
    return Signal(signal.shape, signal.linf, low, high, signal.stretched)


def _outputs(pool: Any, signal: Signal) -> tuple[int, ...]:
    """The sides that the pool leaves, by its own account."""
    try:
        return tuple(pool(torch.zeros(1, *signal.shape[1:])).shape[1:])
    except RuntimeError:
        raise ValueError(f"does not fit {list(signal.shape)} of an image: give another image_size") from None


def _each(size: int | tuple[int, ...], sides: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * sides if len(sizes) == 1 else sizes
