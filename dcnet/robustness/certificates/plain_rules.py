"""Rules for modules: each computes the bounds after a module from those before it."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from dcnet.angle import AngleSlopes
from dcnet.layers import Decoupled, DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from dcnet.losses import MarginSoftmax
from dcnet.losses.cosine import EPS
from dcnet.magnitude import MagnitudeSlopes
from dcnet.models import blocks, tokens
from dcnet.norms import filter_norm
from dcnet.robustness.certificates.decoupled_rules import Bank, affine, bank_of, decoupled, plain_weight
from dcnet.robustness.certificates.matrices import Signal, Window, overlap, product, together, window_of

Rule = Callable[[Any, Signal], Signal]
Kind = TypeVar("Kind", bound=Rule)
rules: dict[type[nn.Module], Rule] = {}
# A subclass that overrides one of these methods may not compute the same as the class of the rule.
COMPUTING = ("forward", "_conv_forward", "decoupled", "plain", "arguments", "options")


def register(*kinds: type[nn.Module]) -> Callable[[Kind], Kind]:
    """A decorator that adds the rule of modules of these classes, and of subclasses that compute the same."""

    def add(rule: Kind) -> Kind:
        rules.update(dict.fromkeys(kinds, rule))
        return rule

    return add


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of the nearest base class that has one, unless the module computes something else."""
    kind = next((kind for kind in type(module).__mro__ if kind in rules), None)
    return None if kind is None or not _computes_as(type(module), kind) else rules[kind]


def _computes_as(own: type[nn.Module], kind: type[nn.Module]) -> bool:
    return all(getattr(own, name) is getattr(kind, name) for name in COMPUTING if hasattr(kind, name))


@register(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
def _same(module: nn.Module, signal: Signal) -> Signal:
    return signal


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
def _plain(layer: _ConvNd | nn.Linear, signal: Signal) -> Signal:
    return affine(signal, layer.weight.detach().double(), _bias(layer), window_of(layer, signal))


@register(DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear)
def _decoupled(layer: Decoupled, signal: Signal) -> Signal:
    window, weight, bias = window_of(layer, signal), plain_weight(layer), _bias(layer)
    own = decoupled(signal, bank_of(layer), bias, window) if weight is None else affine(signal, weight, bias, window)
    share = float(layer._buffers.get("blend", torch.ones(())))  # type: ignore[arg-type]
    if share == 1:
        return own
    blended = torch.full_like(own.linf, share), torch.full_like(own.linf, 1 - share)
    return added(own.scaled(blended[0]), _plain(layer, signal).scaled(blended[1]))  # type: ignore[arg-type]


def _bias(layer: nn.Module) -> Tensor | None:
    bias: Any = layer.bias
    return None if bias is None else bias.detach().double()


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def _batch_norm(norm: _BatchNorm, signal: Signal) -> Signal:
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("normalizes by the statistics of the batch, so that one image can affect another")
    if norm.num_features != signal.channels:
        raise ValueError(f"takes {norm.num_features} channels, but gets {list(signal.shape)} per image")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return signal.scaled(scale, shift if norm.bias is None else shift + norm.bias.detach().double())


@register(nn.ReLU)
def relu(module: nn.Module | None, signal: Signal) -> Signal:
    return Signal(signal.shape, signal.linf, signal.low.relu(), signal.high.relu(), together(signal.l2))


@register(nn.Tanh)
def _tanh(module: nn.Module, signal: Signal) -> Signal:
    return Signal(signal.shape, signal.linf, signal.low.tanh(), signal.high.tanh(), together(signal.l2))


@register(nn.LeakyReLU)
def _leaky(module: nn.LeakyReLU, signal: Signal) -> Signal:
    return _two_slopes(signal, signal.linf.new_tensor(module.negative_slope))


@register(nn.PReLU)
def _prelu(module: nn.PReLU, signal: Signal) -> Signal:
    return _two_slopes(signal, module.weight.detach().double())


def _two_slopes(signal: Signal, slope: Tensor) -> Signal:
    """x for x > 0, slope x otherwise."""
    largest = slope.abs().clamp(min=1).expand_as(signal.linf)
    # The extremes are at both ends, and at zero if the slope is negative.
    ends = torch.stack([torch.where(end < 0, product(slope, end), end) for end in (signal.low, signal.high)])
    within = (signal.low < 0) & (signal.high > 0)
    low = torch.where(within, ends.amin(0).clamp(max=0), ends.amin(0))
    l2 = signal.l2 * float(largest.max())
    return Signal(signal.shape, signal.linf * largest, low, ends.amax(0), together(l2))


@register(nn.Flatten, blocks.Flatten)
def flatten(module: nn.Flatten | None, signal: Signal) -> Signal:
    if module is not None and (module.start_dim, module.end_dim) != (1, -1):
        raise ValueError("flattens dimensions other than (1, -1)")
    if isinstance(module, blocks.Flatten) and module.features != math.prod(signal.shape):
        raise ValueError(f"expects images of image_size={module.image_size}: use this size")
    linf, low, high = (part.repeat_interleave(signal.places) for part in (signal.linf, signal.low, signal.high))
    return Signal((math.prod(signal.shape),), linf, low, high, together(signal.l2))


@register(tokens.Embedding)
def _tokens(module: nn.Module, signal: Signal) -> Signal:
    raise ValueError("makes the tokens of a transformer, whose attention has no rule: certify a convolutional network")


def added(one: Signal, other: Signal) -> Signal:
    """Bounds on the sum of two branches."""
    if one.shape != other.shape:
        raise ValueError(f"adds values of the shapes {list(one.shape)} and {list(other.shape)}")
    return Signal(
        one.shape,
        one.linf + other.linf,
        one.low + other.low,
        one.high + other.high,
        lambda scale: one.stretched(scale) + other.stretched(scale),
    )


@register(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _largest(pool: Any, signal: Signal) -> Signal:
    """|max a - max b| <= max |a - b|, and each value is in at most `overlap` windows."""
    sides = len(signal.shape) - 1
    kernel, stride, dilation = (_each(size, sides) for size in (pool.kernel_size, pool.stride, pool.dilation))
    return _pooled(signal, _outputs(pool, signal), signal.l2 * math.sqrt(overlap(kernel, stride, dilation)))


@register(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def _adaptive_largest(pool: Any, signal: Signal) -> Signal:
    outputs = _outputs(pool, signal)
    if any(side % size for side, size in zip(signal.shape[1:], outputs, strict=True)):
        raise ValueError(f"pools {list(signal.shape[1:])} to {list(outputs)}, for which its windows overlap")
    return _pooled(signal, outputs, signal.l2)


@register(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
@register(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _mean(pool: Any, signal: Signal) -> Signal:
    """The bound is from Schur's test: the largest row sum of the matrix, at most 1, times the largest column sum."""
    if getattr(pool, "divisor_override", None) is not None:
        raise ValueError("has a divisor_override, for which there is no rule")
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
    """Extends the range to zero: a mean that includes padding is between zero and the mean without it."""
    low, high = signal.low.clamp(max=0), signal.high.clamp(min=0)
    return Signal(signal.shape, signal.linf, low, high, signal.stretched)


def _outputs(pool: Any, signal: Signal) -> tuple[int, ...]:
    """The spatial size of the output of the pool."""
    try:
        return tuple(pool(torch.zeros(1, *signal.shape[1:])).shape[1:])
    except RuntimeError:
        raise ValueError(f"does not fit {list(signal.shape)} per image: give another image_size") from None


def _each(size: int | tuple[int, ...], sides: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * sides if len(sizes) == 1 else sizes


def head_logits(head: MarginSoftmax, signal: Signal) -> Signal:
    """Logits s cos(theta), or ||x|| cos(theta), which is linear; times ||w|| unless the margin normalizes weights."""
    if type(head) is not MarginSoftmax:
        raise ValueError("is sharded or a subclass of MarginSoftmax, for which there is no rule")
    if head.margin.centers() > 1:
        raise ValueError(f"has {head.margin.centers()} centers per class, for which there is no rule")
    if signal.shape != (head.in_features,):
        raise ValueError(f"takes {head.in_features} features, but gets {list(signal.shape)} per image")
    weight = head.weight.detach().double()
    norms = filter_norm(weight, EPS)
    units, sizes = weight / norms[:, None], torch.ones_like(norms) if head.margin.unit_weights else norms
    bias = None if head.bias is None else head.bias.detach().double()
    if head.scale.is_norm:
        return affine(signal, units * sizes[:, None], bias, Window())
    sizes = sizes * head.scale(norms).detach().double()
    steep = MagnitudeSlopes(sizes / math.sqrt(EPS), torch.zeros_like(sizes), sizes, True)
    cosine = AngleSlopes(torch.ones((), dtype=torch.float64), rises=True, homogeneous=True)
    return decoupled(signal, Bank(units, steep, cosine, True, False, False, EPS), bias, Window())
