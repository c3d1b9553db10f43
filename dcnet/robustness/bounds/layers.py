"""Layer by layer: what each kind of module makes of values that move. One more kind is one more rule."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from dcnet.layers import Decoupled, DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from dcnet.models import blocks
from dcnet.robustness.bounds.affine import affine
from dcnet.robustness.bounds.bank import bank_of, plain_weight
from dcnet.robustness.bounds.decoupled import decoupled
from dcnet.robustness.bounds.signal import Signal, together
from dcnet.robustness.bounds.window import window_of

Rule = Callable[[Any, Signal], Signal]
Kind = TypeVar("Kind", bound=Rule)
rules: dict[type[nn.Module], Rule] = {}
# What layers compute with: a class that has another of these than the class of a rule computes something else.
COMPUTING = ("forward", "_conv_forward", "decoupled", "plain", "_convolve", "_options")


def register(*kinds: type[nn.Module]) -> Callable[[Kind], Kind]:
    """A decorator that enters the rule of modules of these classes, and of classes that compute the same way."""

    def enter(rule: Kind) -> Kind:
        rules.update(dict.fromkeys(kinds, rule))
        return rule

    return enter


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of the nearest class of the module that has one, unless it computes something else by then."""
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
def _normalised(norm: _BatchNorm, signal: Signal) -> Signal:
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("normalises by the batch itself, where one image can move another")
    if norm.num_features != signal.channels:
        raise ValueError(f"takes {norm.num_features} channels, and gets {list(signal.shape)} of an image")
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
    """x where it is positive, slope x elsewhere."""
    largest = slope.abs().clamp(min=1).expand_as(signal.linf)
    # At both ends and at zero, where it turns if the slope is negative.
    ends = torch.stack([torch.where(end < 0, _times(slope, end), end) for end in (signal.low, signal.high)])
    within = (signal.low < 0) & (signal.high > 0)
    low = torch.where(within, ends.amin(0).clamp(max=0), ends.amin(0))
    l2 = signal.l2 * float(largest.max())
    return Signal(signal.shape, signal.linf * largest, low, ends.amax(0), together(l2))


def _times(slope: Tensor, end: Tensor) -> Tensor:
    """The product, which is zero where the slope is, however large the other is."""
    return (slope * end).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


@register(nn.Flatten, blocks.Flatten)
def flatten(module: nn.Flatten | None, signal: Signal) -> Signal:
    if module is not None and (module.start_dim, module.end_dim) != (1, -1):
        raise ValueError("flattens other dimensions than all but the first")
    if isinstance(module, blocks.Flatten) and module.features != math.prod(signal.shape):
        raise ValueError(f"expects images of image_size={module.image_size}: give that one")
    linf, low, high = (part.repeat_interleave(signal.places) for part in (signal.linf, signal.low, signal.high))
    return Signal((math.prod(signal.shape),), linf, low, high, together(signal.l2))


def added(one: Signal, other: Signal) -> Signal:
    """The sum of two branches."""
    if one.shape != other.shape:
        raise ValueError(f"adds {list(one.shape)} and {list(other.shape)}")
    return Signal(
        one.shape,
        one.linf + other.linf,
        one.low + other.low,
        one.high + other.high,
        lambda scale: one.stretched(scale) + other.stretched(scale),
    )
