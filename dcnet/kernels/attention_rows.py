"""Decides whether the kernel of unit rows normalizes the queries and keys of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcnet.device_functions import AVAILABLE
from dcnet.kernels.dispatch import DTYPES, LARGEST, enabled, is_plain_eager, is_traced, modern

if AVAILABLE:
    from dcnet.kernels.unit_rows import MOST_FEATURES, unit_rows


def unit_vectors(tensors: Sequence[Tensor], eps: float) -> list[Tensor] | None:
    """x / ||x|| of one or two tensors [..., features] in plain eager mode; None if the kernel does not support them."""
    if torch.compiler.is_compiling() or not enabled() or is_traced() or not all(map(_fits, tensors)):
        return None
    first, last = tensors[0], tensors[-1]
    if first.shape[-1] != last.shape[-1] or first.dtype != last.dtype or first.device != last.device:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else first.dtype
    return unit_rows(tensors, eps, dtype) if modern(first.device) else None


def _fits(x: Tensor) -> bool:
    """Whether the tensor is on a GPU, with rows that the kernel supports."""
    plain = x.is_cuda and is_plain_eager(x) and x.layout is torch.strided and not x.is_nested
    return plain and x.dtype in DTYPES and x.shape[-1] <= MOST_FEATURES and 0 < x.numel() < LARGEST * x.shape[-1]
