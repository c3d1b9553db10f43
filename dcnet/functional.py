"""The equation as stateless functions; the layers call these and add nothing to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.norms import accumulation_dtype, filter_norm, patch_norm, vector_norm
from dcnet.operator import Operator, as_operator
from dcnet.part import Value

Size = int | Sequence[int]


@dataclass(frozen=True)
class _Meeting:
    """How filters meet patches: inner products, patch norms, and the shape in which a value per filter meets both."""

    multiply: Callable[[Tensor, Tensor | None], Tensor]
    norm: Callable[[float], Tensor]
    per_filter: tuple[int, ...]

    def spread(self, values: Tensor) -> Tensor:
        return values.view(self.per_filter if values.numel() > 1 else (1,) * len(self.per_filter))


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
    check_input(input, weight.shape[1], -1, "features")
    meeting = _Meeting(
        multiply=lambda filters, offset: F.linear(input, filters, offset),
        norm=lambda eps: vector_norm(input, eps),
        per_filter=(-1,),
    )
    return _decoupled(weight, bias, meeting, options)


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
    return _convolve(F.conv1d, input, weight, bias, stride, padding, dilation, groups, options)


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
    return _convolve(F.conv2d, input, weight, bias, stride, padding, dilation, groups, options)


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
    return _convolve(F.conv3d, input, weight, bias, stride, padding, dilation, groups, options)


def _convolve(
    convolution: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    options: Options,
) -> Tensor:
    kernel = tuple(weight.shape[2:])
    spatial = len(kernel)
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(f"input of shape {list(input.shape)} must have {spatial + 1} or {spatial + 2} dimensions")
    check_input(input, weight.shape[1] * groups, -spatial - 1, "channels")
    batch = input if input.dim() == spatial + 2 else input.unsqueeze(0)
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    ends = _padding_ends(padding, kernel, dilations)

    def multiply(filters: Tensor, offset: Tensor | None) -> Tensor:
        product = convolution(batch, filters, offset, stride, padding, dilation, groups)
        return product.unflatten(1, (groups, -1)) if groups > 1 else product

    def norm(eps: float) -> Tensor:
        n = patch_norm(batch, kernel, strides, ends, dilations, groups, eps)
        return n.unsqueeze(2) if groups > 1 else n

    meeting = _Meeting(multiply, norm, (groups, -1, *[1] * spatial) if groups > 1 else (-1, *[1] * spatial))
    output = _decoupled(weight, bias, meeting, options)
    output = output.flatten(1, 2) if groups > 1 else output
    return output if input.dim() == spatial + 2 else output.squeeze(0)


def _decoupled(weight: Tensor, bias: Tensor | None, at: _Meeting, options: Options) -> Tensor:
    op, eps = as_operator(options["operator"]), options.get("eps", 1e-4)
    constants = _constants(op, options.get("constants") or {}, weight, at)
    w_norm = at.spread(filter_norm(weight, eps))
    # Where h is alpha n and g passes a factor through, n cancels: any n gives the same result, and 1 costs nothing.
    cancels = op.angle.homogeneous and all(part.proportional for part in op.magnitude.parts)
    n = torch.ones_like(w_norm[:1]) if cancels else at.norm(eps)
    h = op.h(op.weighting.argument(w_norm, n), _relative_to_mean(op, constants, n, options))
    factor = op.weighting.factor(w_norm, lambda norm: op.h(norm, constants), constants.get("scale", 1.0))
    if not op.angle.homogeneous:
        product = at.multiply(_scaled(weight, 1 / w_norm), None)
        return _finish(op.g(product * n.reciprocal(), constants), h * factor, bias, product.dtype, at)

    # g(<w, x> / ||w||) (h / n) factor: everything that depends on n alone meets the product as one channel, and what
    # depends on w alone goes into the filters, if g lets its sign through.
    on_filters, gain = 1 / w_norm, h / n
    if op.weighting.multiplies:
        on_filters = torch.ones_like(w_norm)
    elif op.weighting.nonnegative or op.angle.identity:
        on_filters = on_filters * factor
    else:
        gain = gain * factor
    if cancels and op.angle.identity:
        return at.multiply(_scaled(weight, on_filters * gain), bias)
    product = at.multiply(_scaled(weight, on_filters), None)
    return _finish(op.g(product, constants), gain, bias, product.dtype, at)


def _constants(op: Operator, stored: Mapping[str, Tensor], weight: Tensor, at: _Meeting) -> dict[str, Value]:
    """Every constant in float32 or better, those per filter in the shape in which they meet the patches."""
    dtype = accumulation_dtype(weight.dtype)
    values = op.constants({name: tensor.to(dtype) for name, tensor in stored.items()})
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = at.spread(value) if op.slots[name].size == 1 else value.to(weight.device, dtype)
    return values


def _relative_to_mean(op: Operator, constants: dict[str, Value], n: Tensor, options: Options) -> dict[str, Value]:
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


def _scaled(weight: Tensor, factor: Tensor) -> Tensor:
    return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)


def _finish(g: Tensor, h: Tensor, bias: Tensor | None, dtype: torch.dtype, at: _Meeting) -> Tensor:
    # In float32 or better up to here; the result has the dtype of the plain layer's.
    return (g * h if bias is None else torch.addcmul(at.spread(bias), g, h)).to(dtype)


def _each(size: Size, spatial: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * spatial if len(sizes) == 1 else sizes


def _padding_ends(padding: Size | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of zeros before and after each spatial dimension; an odd one of "same" goes after, as in torch."""
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    sizes = _each(0 if isinstance(padding, str) else padding, len(kernel))
    return [(size, size) for size in sizes]


def check_input(input: Tensor, expected: int, dim: int, what: str) -> None:
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, not {input.dtype}: convert it with .float()")
    if input.dim() == 0 or input.shape[dim] != expected:
        raise ValueError(f"input of shape {list(input.shape)} must have {expected} {what}, as the filters do")
