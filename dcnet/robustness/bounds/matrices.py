"""Norms of matrices and of convolutions from above: never less than the norm itself.

No power iteration is among them: until it has converged, and nobody knows when, it gives less than the norm.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What a norm is multiplied by, since float64 rounds; its own error is about 1e-13.
SLACK = 1 + 1e-9
# Complex numbers in the spectrum of a convolution; above that only the bounds that need none are used.
LARGEST_SPECTRUM = 2**26


def matrix_norm(matrices: Tensor) -> float:
    """The largest singular value of the largest of them, [..., rows, columns]."""
    return float(torch.linalg.matrix_norm(matrices, 2).max()) * SLACK


def overlap(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """In how many windows one value is at most: in each direction, the taps that the stride leads to the same value."""
    counts = []
    for size, step, gap in zip(kernel, stride, dilation, strict=True):
        places = [tap * gap % step for tap in range(size)]
        counts.append(max(places.count(place) for place in places))
    return math.prod(counts)


def repeats(spatial: Sequence[int], ends: Sequence[int], mode: str) -> int:
    """How often one value is there after padding, at most; zeros repeat none."""
    if mode == "zeros" or not any(ends):
        return 1
    with torch.enable_grad():
        ones = torch.ones(1, 1, *spatial, dtype=torch.float64, requires_grad=True)
        (counts,) = torch.autograd.grad(F.pad(ones, list(ends), mode=mode).sum(), ones)
    return round(float(counts.max()))


def copies(
    sides: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    ends: Sequence[int],
    mode: str,
) -> int:
    """How often one value is in one and the same window after padding, at most; zeros repeat none."""
    if mode == "zeros" or not any(ends):
        return 1
    counts = []
    for side, size, step, gap, before, after in zip(
        sides, kernel, stride, dilation, ends[-2::-2], ends[::-2], strict=True
    ):
        places = F.pad(torch.arange(side, dtype=torch.float64)[None, None], [before, after], mode=mode)[0, 0]
        windows = places.unfold(0, gap * (size - 1) + 1, step)[:, ::gap]
        counts.append(int((windows[:, :, None] == windows[:, None, :]).sum(2).max()))
    return math.prod(counts)


def convolution_norm(
    weight: Tensor, groups: int, stride: Sequence[int], dilation: Sequence[int], padded: Sequence[int]
) -> float:
    """The L2 norm of a convolution without padding on inputs of the sides `padded`: the smallest of three bounds."""
    grouped = weight.unflatten(0, (groups, -1))
    size = grouped.abs().flatten(3) if weight.dim() > 2 else grouped.abs().unsqueeze(3)
    # Schur's test: the largest sum of a row times the largest of a column.
    schur = math.sqrt(float(size.sum((2, 3)).max()) * float(size.sum((1, 3)).max())) * SLACK
    patches = matrix_norm(grouped.flatten(2)) * math.sqrt(overlap(weight.shape[2:], stride, dilation))
    bounds = [schur, patches]
    numbers = weight.shape[0] * weight.shape[1] * math.prod(padded)
    if math.prod(weight.shape[2:]) > 1 and numbers <= LARGEST_SPECTRUM:
        bounds.append(_spectral_norm(grouped, dilation, padded))
    return min(bounds)


def _spectral_norm(grouped: Tensor, dilation: Sequence[int], padded: Sequence[int]) -> float:
    """The norm on a torus of the padded sides: the convolution is a part of that matrix, and a stride leaves out rows.

    There the Fourier transform splits it into one matrix a frequency; the conjugate half of them is left out.
    """
    sides = grouped.shape[3:]
    taps: list[Any] = [slice(0, gap * (size - 1) + 1, gap) for size, gap in zip(sides, dilation, strict=True)]
    spread = grouped.new_zeros(*grouped.shape[:3], *padded)
    spread[(..., *taps)] = grouped
    spectrum = torch.fft.rfftn(spread, dim=tuple(range(3, grouped.dim()))).flatten(3)
    matrices = spectrum.permute(0, 3, 1, 2).flatten(0, 1)
    matrices = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    # Of A A*, whose eigenvalues take a third of the time that the singular values of A take.
    largest = torch.linalg.eigvalsh(matrices @ matrices.mH)[:, -1].max()
    return math.sqrt(max(float(largest), 0.0)) * SLACK
