"""Cosines between features and class weights, without copies of the weights: there may be a million classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to squared norms, so that a zero vector has a cosine and a gradient.
EPS = 1e-12
# EPS for features in float16, whose gradient must not overflow.
HALF_EPS = 1e-6
# Rows with a norm above HUGE are scaled down first, since their squares would overflow in float32; by a power of two,
# which is exact.
HUGE, SMALL = 1e15, 2.0**-70
# Weights are processed in at most PARTS parts of at least LEAST numbers, so that temporary memory is one part. On a GPU
# each part costs launches; on a CPU small parts stay in the cache.
PARTS, LEAST, LEAST_ON_GPU = 64, 2**18, 2**24


def directions(rows: Tensor, dtype: torch.dtype, given: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Rows [N, D] divided by their norms, and the norms [N].

    Args:
        rows: the features or the weights.
        dtype: the dtype of the computation and the result.
        given: the dtype of the rows before they were cast; None for that of `rows`.
    """
    eps = HALF_EPS if (given or rows.dtype) == torch.float16 else EPS
    rows = rows.to(dtype)
    length = lengths(rows.detach())
    # Other rows are divided by 1, which is exact.
    size = torch.where(length < HUGE, torch.ones_like(length), length)
    unit, norms = normalized(rows / size[:, None], eps)
    return unit, norms * size


def lengths(rows: Tensor) -> Tensor:
    """The norms of rows [N, D], without overflow of the squares."""
    norms = torch.linalg.vector_norm(rows, dim=1)
    return torch.where(norms < HUGE, norms, torch.linalg.vector_norm(rows * SMALL, dim=1) / SMALL)


def _part_size(weight: Tensor) -> int:
    """The number of weight rows per part."""
    least = LEAST_ON_GPU if weight.is_cuda else LEAST
    return max(-(-len(weight) // PARTS), -(-least // weight.shape[1]))


def normalized(rows: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """The rows divided by their norms, and the norms."""
    squares = rows.square().sum(1) + eps
    return rows * squares.rsqrt()[:, None], squares.sqrt()


def cosines(unit: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines [N, C] of unit features [N, D] with weights [C, D], those of the labels [N], and the weight norms [C].

    The cosines of the labels are a separate output, since most margins treat them differently: their gradient then
    costs nothing, while indexing would create one as large as all cosines.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Cosines.apply(unit, weight, labels)
    return found


class _Cosines(torch.autograd.Function):
    """cos = u.w / n with n^2 = |w|^2 + eps, so that d cos / d w = u / n - cos w / n^2, and d n / d w = w / n.

    Summed over features with gradients g, and with p = sum_b g_b u_b / n, that is p - (p.w) w / n^2.
    """

    @staticmethod
    def forward(unit: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norms = _weight_norms(weight)
        cos = F.linear(unit, weight).div_(norms)
        own = cos.gather(1, labels[:, None])[:, 0]
        # Detached: torch 2.11 compiles an output that was changed in place without a gradient.
        return cos.detach(), own, norms.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, of_cos: Tensor, of_labels: Tensor, of_norms: Tensor) -> tuple[Tensor | None, ...]:
        unit, weight, labels, norms = ctx.saved_tensors
        with torch.autocast(unit.device.type, enabled=False):
            if torch.is_grad_enabled():
                # For double backward: norms as a function of the weights, and nothing in place.
                norms = directions(weight, weight.dtype, weight.dtype)[1]
            of_products = of_cos / norms
            by_labels = (of_labels / norms[labels])[:, None]
            of_products = of_products.scatter_add_(1, labels[:, None], by_labels)
            of_unit = of_products @ weight if ctx.needs_input_grad[0] else None
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = _add_norm_gradient(of_products.T @ unit, weight, norms, of_norms)
        return of_unit, of_weight, None


def _weight_norms(weight: Tensor) -> Tensor:
    """sqrt(|w|^2 + eps) of each row."""
    # On a GPU, testing the norms would synchronize with the host.
    if not (weight.is_cuda or torch.compiler.is_compiling()):
        norms = torch.linalg.vector_norm(weight, dim=1)
        if (norms < HUGE).all():
            return norms.square_().add_(EPS).sqrt_()
    norms = torch.cat([lengths(part) for part in weight.split(_part_size(weight))])
    return torch.where(norms < HUGE, (norms.square() + EPS).sqrt(), norms)


def _add_norm_gradient(of_weight: Tensor, weight: Tensor, norms: Tensor, of_norms: Tensor) -> Tensor:
    """Adds the gradient that comes from the norms, which is along the weights."""
    if torch.is_grad_enabled():
        return of_weight + weight * _coefficients(of_weight, weight, norms, of_norms)
    rows = _part_size(weight)
    for part, *rest in zip(
        of_weight.split(rows), weight.split(rows), norms.split(rows), of_norms.split(rows), strict=True
    ):
        part.addcmul_(rest[0], _coefficients(part, *rest))
    return of_weight


def _coefficients(of_weight: Tensor, weight: Tensor, norms: Tensor, of_norms: Tensor) -> Tensor:
    """The coefficients [C, 1] of the weights in their gradient."""
    along = (of_weight * weight).sum(1)
    return ((of_norms - along / norms) / norms)[:, None]
