"""Tests for masked gradients: zero gradients, the loss along gradients, and smoothed gradients."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dcnet import gradient_attack
from dcnet.component import belongs_to
from dcnet.eager import relative_to_mean, scaled
from dcnet.gradient_attack import Goal, cross_entropy
from dcnet.layers import Decoupled
from dcnet.modes import frozen_eval
from dcnet.norms import filter_norm
from dcnet.operator import Operator
from dcnet.parameters import Value
from dcnet.robustness.subject import Subject
from dcnet.robustness.task import batches
from dcnet.training.record import finite

# `surface` measures the loss of this many images, moved by these multiples of epsilon.
SURFACE_IMAGES = 200
AMOUNTS = [at / 4 for at in range(-8, 9)]
Measured = dict[str, Any]


@torch.inference_mode(False)
@torch.no_grad()
def gradients(subject: Subject) -> Measured:
    """The share of correctly classified images whose gradient, as attacks see it, is zero in all pixels.

    If none is classified correctly, all images count. NaN counts as zero, since attacks cannot follow it.
    """
    right, zero = [], []
    with frozen_eval(subject.model):
        goal = Goal(subject.model, cross_entropy)
        for _, images, labels in batches(subject.model, subject.images, subject.labels, subject.batch_size):
            gradient, _, broken = goal.gradient(images, labels)
            right.append(~broken.cpu())
            zero.append((gradient.flatten(1) == 0).double().mean(1).cpu())
    correct, zero_pixels = torch.cat(right), torch.cat(zero)
    counted = zero_pixels[correct] if correct.any() else zero_pixels
    return {
        "images": len(counted),
        "zero": (counted == 1).double().mean().item(),
        "zero_pixels": counted.mean().item(),
    }


@torch.inference_mode(False)
@torch.no_grad()
def surface(subject: Subject) -> Measured:
    """The mean loss along the sign of the gradient and along random signs, within two epsilons of the images.

    As in an attack, pixels are clamped to [0, 1].
    """
    images, labels = subject.images[:SURFACE_IMAGES], subject.labels[:SURFACE_IMAGES]
    count, reach = len(images), min(subject.epsilon, 0.5)
    amounts = [reach * at for at in AMOUNTS]
    sums = {"gradient": [0.0] * len(amounts), "random": [0.0] * len(amounts)}
    with frozen_eval(subject.model):
        goal = Goal(subject.model, cross_entropy)
        for rows, x, y in batches(subject.model, images, labels, subject.batch_size):
            directions = {"gradient": goal.gradient(x, y)[0].sign(), "random": _random_signs(subject.seed, rows, x)}
            for name, direction in directions.items():
                for at, amount in enumerate(amounts):
                    loss, _ = goal.evaluate((x + amount * direction).clamp(0, 1), y)
                    sums[name][at] += float(loss.double().sum())
    means = {name: [finite(total / count) for total in totals] for name, totals in sums.items()}
    return {"images": count, "amounts": amounts, "epsilon": reach, **means}


def _random_signs(seed: int, rows: Tensor, like: Tensor) -> Tensor:
    # A different seed from that of random starts of attacks.
    draws = gradient_attack.uniform(seed + 1, rows, like.shape[1:]).to(like.dtype)
    return torch.where(draws < 0.5, -1.0, 1.0).to(like.dtype)


@contextmanager
def smoothed(model: nn.Module) -> Iterator[int]:
    """Gives decoupled layers in evaluation mode a smoother gradient; their output stays the same.

    With n = ||x|| and c = cos(theta), the gradient of h(n) g(c) becomes k g'(c) w/||w||: 1/n is a constant, and k is
    the slope of the linear part of h, scale / rho for ball and tanh and scale for seg, as if it never saturated. For
    other magnitudes, which have no linear part, k is h(n) / n. With g = cos this is the gradient of a plain
    convolution; where nothing saturates, it is also that of the layer. A layer whose norm cancels, as in linear-cos,
    keeps its gradient; so do layers in training mode and networks that are compiled already.

    Yields the number of layers with a smoothed gradient.
    """
    layers = [module for module in model.modules() if isinstance(module, Decoupled)]
    changed = [layer for layer in layers if not layer.operator.norm_cancels]
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
    return _WithGradientOf.apply(value, _surrogate(layer, input))


class _WithGradientOf(torch.autograd.Function):
    """The value of the first argument with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def _surrogate(layer: Decoupled, input: Tensor) -> Tensor:
    """f(w, x) + bias in eager PyTorch, with the smoothed gradient."""
    op, weighting, patches = layer.operator, layer.operator.weighting, layer.patches(input)
    constants = {
        name: patches.per_filter(value) if isinstance(value, Tensor) and op.slots[name].size == 1 else value
        for name, value in layer.constants().items()
    }
    # No gradient flows through the norm, neither in the magnitude nor in the angle.
    w_norm, n = patches.per_filter(filter_norm(layer.weight, layer.eps)), patches.norm(layer.eps).detach()
    factor = op.factor(w_norm, constants)
    relative = relative_to_mean(op, constants, n, layer.options())
    h = _linear_part(op, weighting.argument(w_norm, n), relative)
    product = patches.multiply(scaled(layer.weight, 1 / w_norm))
    return patches.arrange(patches.finish(op.g(product / n, constants), factor * h, layer.bias, product.dtype))


def _linear_part(op: Operator, n: Tensor, constants: Mapping[str, Value]) -> Tensor:
    """The linear part of the magnitude, or of each of its terms that has one."""
    total: Value = 0.0
    for magnitude, term in zip(op.magnitude.parts, op.magnitude_terms, strict=True):
        own = term.own_constants(constants)
        slope = magnitude.linear_slope(**own) if belongs_to(magnitude, "linear_slope", "value") else None
        total = total + (magnitude.value(n, **own) if slope is None else slope * n)
    return torch.as_tensor(total)
