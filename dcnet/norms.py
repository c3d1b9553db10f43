"""||x|| of every patch and ||w|| of every filter, the cheap way: sum over channels first, then over the window."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.limits import at_least, is_traced


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, whose sums of squares would lose digits or overflow."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def within_range(product: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products of patches with norms n as finite numbers, and 1 / n.

    In float16 an inner product may be beyond 65504 although the norm, in float32, is not beyond anything: it counts as
    the largest number there is. Where the norm is infinite, and so the input is, the results stay NaN.
    """
    if product.dtype != torch.float16:
        return product, n.reciprocal()
    largest = torch.finfo(torch.float16).max
    return product.clamp(-largest, largest), torch.where(n.isinf(), torch.nan, n.reciprocal())


def _sum_of_squares(x: Tensor, dim: int) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    if x.device.type == "cpu" and x.stride(dim) != 1:
        return x.to(dtype).square().sum(dim)
    # One pass and no memory of the size of x, but on the CPU many times slower where channels come first.
    return torch.linalg.vector_norm(x, dim=dim, dtype=dtype).square()


class _SumOfSquares(torch.autograd.Function):
    """sum x^2 over one dimension; autograd's own would pass three times over x on the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return _sum_of_squares(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (x * (2 * grad).unsqueeze(ctx.dim)).to(x.dtype), None


def sum_of_squares(x: Tensor, dim: int) -> Tensor:
    """sum x^2 over a dimension, in float32 or better."""
    # A trace by torch.jit could not be saved with a function of Python in it.
    return _sum_of_squares(x, dim) if is_traced() else _SumOfSquares.apply(x, dim)


def root(squares: Tensor, eps: float) -> Tensor:
    """sqrt(squares + eps), with a finite slope at zero even where eps is 0, or as good as 0 in this dtype."""
    smallest = torch.finfo(squares.dtype).tiny
    return at_least(squares + eps, smallest).sqrt() if eps < smallest else (squares + eps).sqrt()


def filter_norm(weight: Tensor, eps: float = 1e-4) -> Tensor:
    """||w|| = sqrt(sum w^2 + eps) of each filter: [out, ...] -> [out]."""
    return root(sum_of_squares(weight.flatten(1), 1), eps)


def vector_norm(x: Tensor, eps: float = 1e-4) -> Tensor:
    """||x|| = sqrt(sum x^2 + eps) of each row: [..., features] -> [..., 1]."""
    return root(sum_of_squares(x, -1), eps).unsqueeze(-1)


def patch_norm(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """||x|| = sqrt(sum over the patch of x^2 + eps): [N, C, *in] -> [N, groups, *out].

    Every argument has one entry a spatial dimension; padding, of zeros, has one for each end.
    """
    squares = sum_of_squares(x.unflatten(1, (groups, -1)), 2)
    return root(window_sum(squares, kernel_size, stride, padding, dilation), eps)


def window_sum(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Tensor:
    """The sum over each window of the last dimensions, as a convolution with ones would give it.

    A convolution would compute it in TF32 where that is allowed, and `divisor_override=1` is exported wrongly to ONNX.
    """
    if len(kernel_size) < 3 and all(step == 1 for step in dilation):
        return _pooled_sum(x, kernel_size, stride, padding)
    x = _pad(x, padding)
    for i, (size, step, gap) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        x = _sum_along(x, i - len(kernel_size), size, step, gap)
    return x


def _pooled_sum(
    x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[tuple[int, int]]
) -> Tensor:
    if math.prod(kernel_size) == math.prod(stride) == 1:
        return _pad(x, padding)
    # Pooling pads by itself only what is even and at most half a window.
    even = all(before == after <= size // 2 for (before, after), size in zip(padding, kernel_size, strict=True))
    own = tuple(before if even else 0 for before, _ in padding)
    pool = F.avg_pool1d if len(kernel_size) == 1 else F.avg_pool2d
    return pool(x if even else _pad(x, padding), tuple(kernel_size), tuple(stride), own) * math.prod(kernel_size)


def _sum_along(x: Tensor, dim: int, size: int, stride: int, dilation: int) -> Tensor:
    length = x.shape[dim] - (size - 1) * dilation
    shifted = [x.narrow(dim, i * dilation, length) for i in range(size)]
    total = sum(shifted[1:], start=shifted[0])
    return total.transpose(dim, -1)[..., ::stride].transpose(dim, -1)


def _pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    ends = [end for pair in reversed(padding) for end in pair]
    return F.pad(x, ends) if any(ends) else x
