"""The equation as stateless functions; the layers call these and add nothing to them."""

import functools
from collections.abc import Mapping
from typing import Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.meeting import Meeting, Size, convolve, meet_rows
from dcnet.norms import accumulation_dtype, filter_norm, patch_norm, vector_norm
from dcnet.operator import Operator, as_operator
from dcnet.part import Value

__all__ = [
    "Options",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "filter_norm",
    "patch_norm",
    "vector_norm",
]


class Options(TypedDict, total=False):
    """What every function here takes by name beside torch's own arguments.

    operator: an Operator or its spec.
    eps: added under the square root of both norms.
    constants: what a layer has learned, by name and as it stores it; without it the constants are as they start.
    mean_norm: the running mean norm of a relative radius; without it the batch's own mean is used.
    training: use the batch's own mean norm, with its gradient, and update `mean_norm` in place.
    """

    operator: Required[Operator | str]
    eps: float
    constants: Mapping[str, Tensor] | None
    mean_norm: Tensor | None
    training: bool


def decoupled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """f(w, x) = h(||w||, ||x||) * g(theta) + bias of every row with every filter: [..., in] -> [..., out]."""
    return _decoupled(weight, bias, meet_rows(input, weight), options)


def decoupled_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) of every patch of a sequence, [N, C, L] or [C, L]; see `decoupled_conv2d`."""
    combine = functools.partial(_decoupled, weight, bias, options=options)
    return convolve(F.conv1d, input, weight, stride, padding, dilation, groups, combine)


def decoupled_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) = h(||w||, ||x||) * g(theta) + bias of every patch x with every filter w (Eq. 3).

    Arguments and shapes are those of `torch.nn.functional.conv2d`; the operator and its state come by name, as in
    `Options`.
    """
    combine = functools.partial(_decoupled, weight, bias, options=options)
    return convolve(F.conv2d, input, weight, stride, padding, dilation, groups, combine)


def decoupled_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) of every patch of a volume, [N, C, D, H, W] or [C, D, H, W]; see `decoupled_conv2d`."""
    combine = functools.partial(_decoupled, weight, bias, options=options)
    return convolve(F.conv3d, input, weight, stride, padding, dilation, groups, combine)


def _decoupled(weight: Tensor, bias: Tensor | None, at: Meeting, options: Options) -> Tensor:
    op, eps = _check_options(options), options.get("eps", 1e-4)
    constants = _constants(op, options.get("constants") or {}, weight, at)
    w_norm = at.spread(filter_norm(weight, eps))
    factor = op.weighting.factor(w_norm, lambda norm: op.h(norm, constants), op.alpha(constants))
    # g(<w, x> / ||w||) (h / n) factor: what depends on w alone goes into the filters, if g lets it through.
    on_filters, on_output = 1 / w_norm, factor
    if op.angle.homogeneous and op.weighting.multiplies:
        on_filters, on_output = torch.ones_like(w_norm), 1.0
    elif op.angle.homogeneous and (op.weighting.nonnegative or op.angle.identity):
        on_filters, on_output = on_filters * factor, 1.0

    cancels = norm_cancels(op)
    if cancels and op.angle.identity:
        h = op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), constants)
        return at.multiply(scaled(weight, on_filters * h), bias)
    product = at.multiply(scaled(weight, on_filters), None)
    n = torch.ones_like(w_norm[:1]) if cancels else at.norm(eps)
    # Everything that depends on n alone is formed on its one channel before it meets those of the product.
    h = op.h(op.weighting.argument(w_norm, n), relative_to_mean(op, constants, n, options))
    h = h * on_output if isinstance(on_output, Tensor) else h
    if op.angle.homogeneous:
        return at.finish(op.g(product, constants), h / n, bias, product.dtype)
    return at.finish(op.g(product * n.reciprocal(), constants), h, bias, product.dtype)


def _check_options(options: Options) -> Operator:
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unknown option {name!r}: known are {', '.join(Options.__annotations__)}")
    if "operator" not in options:
        raise TypeError("operator is missing: give an Operator or a spec, as in operator='tanh-cos'")
    op = as_operator(options["operator"])
    learned = op.learned
    for name in options.get("constants") or {}:
        if name not in learned:
            raise ValueError(f"{str(op)!r} learns no constant {name!r}, only {', '.join(learned) or 'none'}")
    return op


def norm_cancels(op: Operator) -> bool:
    """Whether h is alpha n and g passes a factor through: any n gives the same result then, and 1 costs nothing."""
    return op.angle.homogeneous and all(part.proportional for part in op.magnitude.parts)


def _constants(op: Operator, stored: Mapping[str, Tensor], weight: Tensor, at: Meeting) -> dict[str, Value]:
    """Every constant in float32 or better, those per filter in the shape in which they meet the patches."""
    dtype = accumulation_dtype(weight.dtype)
    values = op.constants({name: tensor.to(dtype) for name, tensor in stored.items()})
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = at.spread(value) if op.slots[name].size == 1 else value.to(weight.device, dtype)
    return values


def relative_to_mean(op: Operator, constants: dict[str, Value], n: Tensor, options: Options) -> dict[str, Value]:
    """The constants with every relative radius multiplied by the mean norm."""
    if op.decay is None:
        return constants
    mean = _mean_norm(n, options.get("mean_norm"), options.get("training", False), op.decay)
    return {name: value * mean if op.slots[name].relative else value for name, value in constants.items()}


def _mean_norm(n: Tensor, running: Tensor | None, training: bool, decay: float) -> Tensor:
    """The running mean of ||x|| in evaluation, otherwise the batch's own, which then enters the running mean."""
    if running is not None and not training:
        # Zero means that no batch was seen yet; a patch norm is never zero.
        return torch.where(running > 0, running, torch.ones_like(running)).to(n.dtype)
    mean = n.sum() / max(n.numel(), 1)
    if running is not None:
        _update_mean(running, mean.detach().to(running.dtype), decay)
    return mean


def _update_mean(running: Tensor, mean: Tensor, decay: float) -> None:
    """The first batch's mean, then decay * running + (1 - decay) * mean; empty or non-finite batches leave no trace."""
    updated = torch.where(running > 0, decay * running + (1 - decay) * mean, mean)
    running.copy_(torch.where(mean.isfinite() & (mean > 0), updated, running))


def scaled(weight: Tensor, factor: Tensor) -> Tensor:
    return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
