"""A backward pass that does not saturate, for attacks that saturated magnitudes would hide the way from.

Where a magnitude is saturated, a decoupled layer no longer answers to the size of a patch, and a division by ||x||
takes away what is left of the gradient along the patch. An attacker need not follow that gradient: this is another.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.equation import norm_cancels, relative_to_mean, scaled
from dcnet.layers import Decoupled, DecoupledLinear
from dcnet.magnitude import Ball, Segmented, Tanh
from dcnet.meeting import Meeting, convolve, meet_rows
from dcnet.norms import filter_norm
from dcnet.operator import Operator
from dcnet.part import Held, Part, Value

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# The slope of the linear part of each magnitude that bends away from it, by its constants.
SLOPES: dict[type[Part], Callable[[Mapping[str, Value]], Value]] = {
    Ball: lambda constants: constants["scale"] / constants["radius"],
    Tanh: lambda constants: constants["scale"] / constants["radius"],
    Segmented: lambda constants: constants["scale"],
}


@contextmanager
def smoothed(model: nn.Module) -> Iterator[int]:
    """Inside, decoupled layers in evaluation mode give what they give, with the gradient of something smoother.

    With n = ||x|| and c = cos(theta), the gradient of h(n) g(c) becomes k g'(c) w/||w||: 1/n is held fixed, and k is
    the slope of the linear part of h, scale / rho for ball and tanh and scale for seg, as if they never left it. For
    other magnitudes, which have no such part, k is h(n) / n. With g = cos this is the gradient of a plain convolution,
    and where nothing saturates that of the layer itself. A layer whose norm cancels, as in linear-cos, is left alone.

    It gives the number of layers whose gradient is another one. Layers in training mode are left alone, too, and so is
    a network that was compiled before.
    """
    layers = [module for module in model.modules() if isinstance(module, Decoupled)]
    changed = [layer for layer in layers if not norm_cancels(layer.operator)]
    try:
        for layer in changed:
            layer.__dict__["decoupled"] = functools.partial(_decoupled, layer)
        yield len(changed)
    finally:
        for layer in changed:
            layer.__dict__.pop("decoupled", None)


def _decoupled(layer: Decoupled, input: Tensor) -> Tensor:
    usual = functools.partial(type(layer).decoupled, layer)
    if layer.training or not torch.is_grad_enabled():
        return usual(input)
    with torch.no_grad():
        value = usual(input)
    return _Instead.apply(value, _surrogate(layer, input))


class _Instead(torch.autograd.Function):
    """The value of the first with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def _surrogate(layer: Decoupled, input: Tensor) -> Tensor:
    """f(w, x) + bias by plain torch, which has the smoothed gradient."""
    combine = functools.partial(_combined, layer)
    if isinstance(layer, DecoupledLinear):
        return combine(meet_rows(input, layer.weight))

    def function(x: Tensor, weight: Tensor, bias: Any, *window: Any, **options: Any) -> Tensor:
        stride, padding, dilation, groups = window
        convolution = CONVOLUTIONS[weight.dim() - 2]
        return convolve(convolution, x, weight, stride, padding, dilation, groups, combine)

    # The layer's own way, which knows about kinds of padding.
    return layer._convolve(function, input)  # type: ignore[operator]


def _combined(layer: Decoupled, at: Meeting) -> Tensor:
    op, weighting = layer.operator, layer.operator.weighting
    constants = {name: _spread(op, name, value, at) for name, value in layer.constants().items()}
    # Nothing is to flow through the norm, neither by the magnitude nor by the angle.
    w_norm, n = at.spread(filter_norm(layer.weight, layer.eps)), at.norm(layer.eps).detach()
    factor = weighting.factor(w_norm, lambda norm: op.h(norm, constants), op.alpha(constants))
    relative = relative_to_mean(op, constants, n, layer._options())
    parts = [_straight(held, weighting.argument(w_norm, n), relative) for held in op._magnitudes]
    h = sum(parts[1:], start=parts[0])
    product = at.multiply(scaled(layer.weight, 1 / w_norm), None)
    return at.finish(op.g(product / n, constants), factor * h, layer.bias, product.dtype)


def _spread(op: Operator, name: str, value: Value, at: Meeting) -> Value:
    """A constant per filter in the shape in which it meets the patches."""
    return at.spread(value) if isinstance(value, Tensor) and op.slots[name].size == 1 else value


def _straight(held: Held, n: Tensor, constants: Mapping[str, Value]) -> Tensor:
    """The linear part of a magnitude, or its value where it has none."""
    slope = SLOPES.get(type(held.part))
    if slope is None:
        return held.value(n, constants)
    return slope({name: constants[given] for name, given in held.names.items()}) * n
