"""Cosines of features with the weights of classes, however many, without copies of the weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to squared norms, so that zeros have a cosine and a gradient.
EPS = 1e-12
# As EPS, for features in float16, which must be able to hold the gradient.
HALF_EPS = 1e-6
# Rows with a larger norm are scaled down first, since their squares would leave the range of float32; by a power of
# two, which is exact.
HUGE, SMALL = 1e15, 2.0**-70
# The weights are worked on in so many parts at most, and in parts of so many numbers at least; one part is all that is
# taken beyond the weights and their gradient. On a GPU each part costs launches, on a CPU small ones stay in its cache.
PARTS, LEAST, LEAST_ON_GPU = 64, 2**18, 2**24


def directions(rows: Tensor, dtype: torch.dtype, given: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Features or weights [N, D] over their norms, and the norms [N].

    Args:
        rows: the features or the weights.
        dtype: what to compute in.
        given: the dtype of the rows before they were cast; None for that of `rows`.
    """
    eps = HALF_EPS if (given or rows.dtype) == torch.float16 else EPS
    rows = rows.to(dtype)
    length = lengths(rows.detach())
    # Others are divided by 1, which leaves them all their bits.
    size = torch.where(length < HUGE, torch.ones_like(length), length)
    unit, norms = normalized(rows / size[:, None], eps)
    return unit, norms * size


def lengths(rows: Tensor) -> Tensor:
    """The norms of rows [N, D], also of those whose squares would overflow."""
    norms = torch.linalg.vector_norm(rows, dim=1)
    return torch.where(norms < HUGE, norms, torch.linalg.vector_norm(rows * SMALL, dim=1) / SMALL)


def _part_size(weight: Tensor) -> int:
    """How many rows of the weights are worked on at a time."""
    least = LEAST_ON_GPU if weight.is_cuda else LEAST
    return max(-(-len(weight) // PARTS), -(-least // weight.shape[1]))


def normalized(rows: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """The rows over their norms, and the norms."""
    squares = rows.square().sum(1) + eps
    return rows * squares.rsqrt()[:, None], squares.sqrt()


def cosines(unit: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of features [N, D] of norm 1: their cosines [N, C] with weights [C, D], those of their labels [N], and norms [C].

    The cosines of the labels are given once more, since most margins treat them differently: a gradient that comes by
    them costs nothing, where one that came by indexing would be as large as all cosines, or all weights.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Cosines.apply(unit, weight, labels)
    return found


class _Cosines(torch.autograd.Function):
    """cos = u.w / n with n^2 = |w|^2 + eps; so d cos / d w = u / n - cos w / n^2, and d n / d w = w / n.

    Summed over features with gradients g, and with p = sum_b g_b u_b / n, that is p - (p.w) w / n^2.
    """

    @staticmethod
    def forward(unit: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norms = _weight_norms(weight)
        cos = F.linear(unit, weight).div_(norms)
        own = cos.gather(1, labels[:, None])[:, 0]
        # Detached, since torch 2.11 compiles what is returned as it was changed in place without a gradient.
        return cos.detach(), own, norms.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, of_cos: Tensor, of_labels: Tensor, of_norms: Tensor) -> tuple[Tensor | None, ...]:
        unit, weight, labels, norms = ctx.saved_tensors
        with torch.autocast(unit.device.type, enabled=False):
            if torch.is_grad_enabled():
                # Somebody wants to differentiate once more: everything is left as it is, and known from the weights.
                norms = directions(weight, weight.dtype, weight.dtype)[1]
            of_products = of_cos / norms
            by_labels = (of_labels / norms[labels])[:, None]
            of_products = of_products.scatter_add_(1, labels[:, None], by_labels)
            of_unit = of_products @ weight if ctx.needs_input_grad[0] else None
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = _along(of_products.T @ unit, weight, norms, of_norms)
        return of_unit, of_weight, None


def _weight_norms(weight: Tensor) -> Tensor:
    """sqrt(|w|^2 + eps) of each row."""
    # On a GPU a look at the norms would make the host wait.
    if not (weight.is_cuda or torch.compiler.is_compiling()):
        norms = torch.linalg.vector_norm(weight, dim=1)
        if (norms < HUGE).all():
            return norms.square_().add_(EPS).sqrt_()
    norms = torch.cat([lengths(part) for part in weight.split(_part_size(weight))])
    return torch.where(norms < HUGE, (norms.square() + EPS).sqrt(), norms)


def _along(of_weight: Tensor, weight: Tensor, norms: Tensor, of_norms: Tensor) -> Tensor:
    """Adds what comes by the norms, which is along the weights."""
    if torch.is_grad_enabled():
        return of_weight + weight * _share(of_weight, weight, norms, of_norms)
    rows = _part_size(weight)
    for part, *rest in zip(
        of_weight.split(rows), weight.split(rows), norms.split(rows), of_norms.split(rows), strict=True
    ):
        part.addcmul_(rest[0], _share(part, *rest))
    return of_weight


def _share(of_weight: Tensor, weight: Tensor, norms: Tensor, of_norms: Tensor) -> Tensor:
    """How much of the weights themselves is in their gradients, [C, 1]."""
    along = (of_weight * weight).sum(1)
    return ((of_norms - along / norms) / norms)[:, None]
