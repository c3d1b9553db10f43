"""The gradient of the orthonormality penalty with respect to the products of filters, in one launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.dispatch import enabled, modern
from dcnet.kernels.launch import Launch, aligned, device_guard, power_of_two, raw_stream

# A program holds one row of products.
MOST_FILTERS = 16_384


def penalty_gradient_(products: Tensor, inverse: Tensor) -> Tensor:
    """Replaces the products W W^T by the gradient of ||C - I||_F^2 with respect to them.

    C are the cosines between filters: products times the inverse norms of both.

    Args:
        products: float32 or float64, [blocks, filters, filters], contiguous.
        inverse: 1 / ||w|| of each filter, [blocks, filters].
    """
    if _fits(products):
        with device_guard(products):
            launch, stream = _launch(*products.shape[:2], products.device), raw_stream(products.device)
            launch(products, inverse, stream=stream, aligned=aligned(products, inverse))
        return products
    both = inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    difference = products.mul_(both)
    difference.diagonal(dim1=-2, dim2=-1).sub_(1)
    along = difference.square().sum(-1) + difference.diagonal(dim1=-2, dim2=-1)
    gradient = difference.mul_(both).mul_(2)
    gradient.diagonal(dim1=-2, dim2=-1).sub_(2 * along * inverse * inverse)
    return gradient


def _fits(products: Tensor) -> bool:
    """Whether the kernel supports these products."""
    small = products.dtype == torch.float32 and products.shape[-1] <= MOST_FILTERS
    return small and enabled() and products.is_cuda and modern(products.device)


@functools.lru_cache(maxsize=64)
def _launch(blocks: int, filters: int, device: torch.device) -> Launch:
    """The launch for one device, on which its compiled kernel is loaded."""
    width = power_of_two(filters)
    # Blocks come first: the other dimensions of a grid have at most 65,535 programs.
    return Launch(penalty_kernel, (blocks, filters), (filters,), 4 if width <= 1024 else 8, WIDTH=width)


@device_function
def penalty_kernel(products: Block, inverse: Block, filters: Block, WIDTH: constexpr) -> None:
    """One row of the gradient, in place: 2 (C - I) / (||w_i|| ||w_j||), less the part of the norms on the diagonal."""
    block, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, WIDTH)
    inside = j < filters
    row = products + (block * filters + i) * filters + j
    here = tl.load(inverse + block * filters + i)
    there = tl.load(inverse + block * filters + j, mask=inside, other=0.0)
    cosine = tl.load(row, mask=inside, other=0.0) * here * there
    difference = cosine - tl.where(j == i, 1.0, 0.0)
    along = tl.sum(tl.where(inside, difference * cosine, 0.0))
    gradient = 2 * difference * here * there - tl.where(j == i, 2 * along * here * here, 0.0)
    tl.store(row, gradient, mask=inside)
