"""Patch norms ||x||, filter norms ||w||, and the running mean of ||x||: its update, decay and warm-up.

Patch norms are sums over channels, then over the window, which is cheap."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dcnet.clamp import at_least, is_traced
from dcnet.cpu_passes import is_on_cpu

HALF_PRECISIONS = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, whose sums of squares would lose digits or overflow."""
    return torch.float32 if dtype in HALF_PRECISIONS else dtype


def within_range(product: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Clamps the inner products of patches with norms n to finite numbers. Returns them and 1 / n.

    In float16 an inner product can exceed 65504 although the norm, in float32, is finite: it is clamped to the largest
    number. If the norm is infinite, as for an infinite input, the results stay NaN.
    """
    if product.dtype != torch.float16:
        return product, n.reciprocal()
    largest = torch.finfo(torch.float16).max
    return product.clamp(-largest, largest), torch.where(n.isinf(), torch.nan, n.reciprocal())


class _SumOfSquares(torch.autograd.Function):
    """sum x^2 over one dimension; the backward of autograd would pass over x three times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        dtype = torch.float32 if x.dtype in HALF_PRECISIONS else x.dtype
        if x.device.type == "cpu" and x.stride(dim) != 1:
            return x.to(dtype).square().sum(dim)
        # One pass and no memory of the size of x, but on the CPU many times slower if channels come first.
        return torch.linalg.vector_norm(x, dim=dim, dtype=dtype).square()

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
    # torch.jit cannot save a trace that contains a Python function.
    return _SumOfSquares.forward(x, dim) if is_traced() else _SumOfSquares.apply(x, dim)


def root(squares: Tensor, eps: float) -> Tensor:
    """sqrt(squares + eps), with a finite slope at zero even if eps is 0, or rounds to 0 in this dtype."""
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

    Sequences have one entry per spatial dimension; that of `padding` is the number of zeros before and after.
    """
    squares = sum_of_squares(x.unflatten(1, (groups, -1)), 2)
    # Pooling on a CPU takes up to ten times as long as sums along one dimension after another.
    in_turn = len(kernel_size) == 3 or any(step != 1 for step in dilation) or is_on_cpu(x)
    sums = window_sum if in_turn else pooled_sum
    return root(sums(squares, kernel_size, stride, padding, dilation), eps)


def window_sum(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Tensor:
    """The sum over each window of the last dimensions, as a convolution with ones would give it.

    A convolution would compute it in TF32 if that is allowed.
    """
    x = _pad(x, padding)
    for i, (size, step, gap) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        x = _sum_along(x, i - len(kernel_size), size, step, gap)
    return x


def pooled_sum(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Tensor:
    """`window_sum` of one or two dimensions without dilation, in few operations.

    `divisor_override=1` is exported wrongly to ONNX.
    """
    if math.prod(kernel_size) == math.prod(stride) == 1:
        return _pad(x, padding)
    # torch's pooling pads only symmetrically, and by at most half a window.
    even = all(before == after <= size // 2 for (before, after), size in zip(padding, kernel_size, strict=True))
    own = tuple(before if even else 0 for before, _ in padding)
    pool = F.avg_pool1d if len(kernel_size) == 1 else F.avg_pool2d
    return pool(x if even else _pad(x, padding), tuple(kernel_size), tuple(stride), own) * math.prod(kernel_size)


def _sum_along(x: Tensor, dim: int, size: int, stride: int, dilation: int) -> Tensor:
    x = x.transpose(dim, -1)
    length = x.shape[-1] - (size - 1) * dilation
    total = x[..., :length:stride]
    for i in range(1, size):
        total = total + x[..., i * dilation : i * dilation + length : stride]
    return total.transpose(dim, -1)


def _pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    ends = list(itertools.chain.from_iterable(reversed(padding)))
    return F.pad(x, ends) if any(ends) else x


@dataclass(frozen=True)
class Processes:
    """The processes of a group of torch.distributed whose batches count as one; all processes without a group."""

    group: Any = None

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def __deepcopy__(self, memo: Any) -> "Processes":
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(f"{self.group!r} cannot be pickled: pickle the state_dict of the model instead")
        return dict(vars(self))


def mean_norm(
    n: Tensor, running: Tensor | None, count: Tensor | None, decay: float, training: bool, sync: Processes | None
) -> Tensor:
    """The running mean of ||x|| in evaluation; otherwise the mean of the batch, which updates the running mean."""
    if running is not None and not training:
        # Zero means that no batch was seen yet; a patch norm is never zero.
        return torch.where(running > 0, running, torch.ones_like(running)).to(n.dtype)
    mean = _batch_mean(n, sync if sync is not None and sync.several else None)
    if running is not None:
        _update_mean(running, count, mean.detach().to(running.dtype), decay)
    # The mean of an empty batch is 0; with its reciprocal, gradients would be zero times infinity.
    return mean + 1 if n.numel() == 0 else mean


def _batch_mean(n: Tensor, shared: Processes | None) -> Tensor:
    if shared is None:
        return n.sum() / max(n.numel(), 1)
    # Both sums, since processes may have different numbers of patches.
    total, count = _SumOverProcesses.apply(torch.stack((n.sum(), n.new_full((), n.numel()))), shared.group)
    return total / count.clamp(min=1)


class _SumOverProcesses(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs, since the loss of each depends on every term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        # Detached, since torch 2.11 compiles a result that was changed in place without a gradient.
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _SumOverProcesses.apply(gradients[0].contiguous(), ctx.group), None


def _update_mean(running: Tensor, count: Tensor | None, mean: Tensor, decay: float) -> None:
    """Sets it to the mean of the first batch, then to decay * running + (1 - decay) * mean; skips non-finite means."""
    started, usable = running > 0, mean.isfinite() & (mean > 0)
    share: float | Tensor = decay
    if count is not None:
        # A mean norm that was set to zero starts over, for any count.
        seen = torch.where(started, count, 0)
        share = warmed_up(decay, seen.to(running.dtype))
        _write(count, torch.where(usable, seen + 1, count))
    updated = torch.where(started, share * running + (1 - share) * mean, mean)
    _write(running, torch.where(usable, updated, running))


def warmed_up(decay: float, count: Tensor) -> Tensor:
    """min(decay, (1 + t) / (10 + t)) after t batches: early on, the running mean covers about the last tenth of them.

    With a constant decay of 0.999, the first batch, from before training, would still have a weight of 37 % after 1,000
    batches. From batch 8,990 on the decay is 0.999.
    """
    return ((1 + count) / (10 + count)).clamp(max=decay)


def settled_count(decay: float) -> int:
    """The number of batches after which the decay is no longer warming up."""
    return max(math.ceil((10 * decay - 1) / (1 - decay)), 0)


def _write(buffer: Tensor, value: Tensor) -> None:
    # Through a view, since torch.compile loses writes to a zero-dimensional tensor in float64.
    buffer.view(1).copy_(value)
