"""The equation as stateless functions; the layers call these and add nothing to them."""

import functools
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
class Meeting:
    """How filters meet patches: inner products, patch norms, and the shape in which a value per filter meets both."""

    multiply: Callable[[Tensor, Tensor | None], Tensor]
    norm: Callable[[float], Tensor]
    per_filter: tuple[int, ...]

    def spread(self, values: Tensor) -> Tensor:
        return values.view(self.per_filter if values.numel() > 1 else (1,) * len(self.per_filter))

    def finish(self, g: Tensor, h: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """g * h + bias: in float32 or better up to here, and then in the dtype of the plain layer's result."""
        return (g * h if bias is None else torch.addcmul(self.spread(bias), g, h)).to(dtype)


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


def meet_rows(input: Tensor, weight: Tensor) -> Meeting:
    """How the rows of the input, [..., in], meet filters of the shape of `weight`."""
    check_input(input, weight.shape[1], -1, "features")
    return Meeting(
        multiply=lambda filters, offset: F.linear(input, filters, offset),
        norm=lambda eps: vector_norm(input, eps),
        per_filter=(-1,),
    )


def convolve(
    convolution: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    combine: Callable[[Meeting], Tensor],
) -> Tensor:
    """What `combine` makes of the patches of the input and filters of the shape of `weight`, batched as the input."""
    kernel = tuple(weight.shape[2:])
    spatial = len(kernel)
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(f"input of shape {list(input.shape)} must have {spatial + 1} or {spatial + 2} dimensions")
    check_input(input, weight.shape[1] * groups, -spatial - 1, "channels")
    batch = input if input.dim() == spatial + 2 else input.unsqueeze(0)
    # One size for all dimensions is written out: the export to ONNX takes a tuple of one as it is, and is wrong.
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    pads = padding if isinstance(padding, str) else _each(padding, spatial)
    ends = _padding_ends(padding, kernel, dilations)

    last = _channels_last(batch) or _channels_last(weight)

    def multiply(filters: Tensor, offset: Tensor | None) -> Tensor:
        product = convolution(batch, filters, offset, strides, pads, dilations, groups)
        product = product.unflatten(1, (groups, -1)) if groups > 1 else product
        return _move_channels(product, groups, 1, -1) if last else product

    def norm(eps: float) -> Tensor:
        n = patch_norm(batch, kernel, strides, ends, dilations, groups, eps)
        n = n.unsqueeze(2) if groups > 1 else n
        return _move_channels(n, groups, 1, -1) if last else n

    per_filter = (groups, -1) if groups > 1 else (-1,)
    output = combine(Meeting(multiply, norm, per_filter if last else (*per_filter, *[1] * spatial)))
    output = _move_channels(output, groups, -1, 1) if last else output
    output = output.flatten(1, 2) if groups > 1 else output
    return output if input.dim() == spatial + 2 else output.squeeze(0)


def _channels_last(x: Tensor) -> bool:
    """Whether the channels of images or volumes lie side by side.

    What is made of one norm for many channels then has to be made so too: the layout of a tensor of one channel does
    not tell, and operations between different layouts are slow. A compiler sees to that by itself.
    """
    if x.dim() < 4 or torch.compiler.is_compiling():
        return False
    return x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


def _move_channels(x: Tensor, groups: int, source: int, target: int) -> Tensor:
    """A view with the channels, and their groups before them, moved from the front (1) to the back (-1), or back."""
    if groups == 1:
        return x.movedim(source, target)
    ends = {1: (1, 2), -1: (-2, -1)}
    return x.movedim(ends[source], ends[target])


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
    for name in options.get("constants") or {}:
        if name not in op.learned:
            raise ValueError(f"{str(op)!r} learns no constant {name!r}, only {', '.join(op.learned) or 'none'}")
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
    if input.dim() < -dim or input.shape[dim] != expected:
        raise ValueError(f"input of shape {list(input.shape)} must have {expected} {what}, as the filters do")
