"""How filters meet what they see: the rows of a matrix, or the patches of a sequence, an image or a volume."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.norms import patch_norm, vector_norm

Size = int | Sequence[int]


@dataclass(frozen=True)
class Meeting:
    """How filters meet patches: inner products, patch norms, and the shape in which a value per filter meets both."""

    multiply: Callable[[Tensor, Tensor | None], Tensor]
    norm: Callable[[float], Tensor]
    per_filter: tuple[int, ...]

    def spread(self, values: Tensor) -> Tensor:
        return values.view(self.per_filter if values.numel() != 1 else (1,) * len(self.per_filter))

    def finish(self, g: Tensor, h: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """g * h + bias: in float32 or better up to here, and then in the dtype of the plain layer's result."""
        return (g * h if bias is None else torch.addcmul(self.spread(bias), g, h)).to(dtype)


def meet_rows(input: Tensor, weight: Tensor) -> Meeting:
    """How the rows of the input, [..., in], meet filters of the shape of `weight`."""
    check_input(input, weight.shape[1], -1, "features")
    return Meeting(
        multiply=lambda filters, offset: F.linear(input, filters, offset),
        norm=lambda eps: vector_norm(input, eps),
        per_filter=(-1,),
    )


def each_row(input: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What `compute` makes of all rows of the input; the sequences of a nested tensor are one batch of rows."""
    check_tensor(input)
    if not input.is_nested:
        return compute(input)
    if input.layout == torch.jagged:
        jagged: Any = input
        return torch.nested.nested_tensor_from_jagged(compute(jagged.values()), jagged.offsets())
    parts = input.unbind()
    rows = compute(torch.cat([part.flatten(0, -2) for part in parts]))
    sizes = [part.shape[:-1] for part in parts]
    found = [one.unflatten(0, size) for one, size in zip(rows.split([s.numel() for s in sizes]), sizes, strict=True)]
    return torch.nested.as_nested_tensor(found, layout=input.layout)


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
    check_tensor(input)
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(f"input of shape {list(input.shape)} must have {spatial + 1} or {spatial + 2} dimensions")
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"groups must part the {weight.shape[0]} filters evenly, not {groups}")
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


def _each(size: Size, spatial: int) -> tuple[int, ...]:
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    return sizes * spatial if len(sizes) == 1 else sizes


def _padding_ends(padding: Size | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of zeros before and after each spatial dimension; an odd one of "same" goes after, as in torch."""
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    sizes = _each(0 if isinstance(padding, str) else padding, len(kernel))
    return [(size, size) for size in sizes]


def check_tensor(input: Tensor) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor, not {type(input).__name__}")


def check_input(input: Tensor, expected: int, dim: int, what: str) -> None:
    check_tensor(input)
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, not {input.dtype}: convert it with .float()")
    if input.dim() < -dim or input.shape[dim] != expected:
        raise ValueError(f"input of shape {list(input.shape)} must have {expected} {what}, as the filters do")
