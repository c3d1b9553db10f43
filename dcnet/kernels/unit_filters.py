"""Normalized filters in one launch, their gradient in another: all that `linear-cos` adds to a convolution."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dcnet.kernels.filter_kernels import unit_gradient_kernel, unit_kernel
from dcnet.kernels.fused_layer import dense
from dcnet.kernels.launch import Launch, aligned, device_guard, raw_stream
from dcnet.kernels.plan import lies_channels_last
from dcnet.norms import filter_norm


class UnitFilters(torch.autograd.Function):
    """scale w / ||w|| of every filter, in the dtype and memory layout of the convolution."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, scale: float, eps: float, dtype: torch.dtype, last: bool) -> Tensor:
        rows, layout = dense(w), torch.channels_last if last or lies_channels_last(w) else torch.contiguous_format
        ctx.settings = (tuple(w.shape), rows.stride(), layout == torch.channels_last, scale, eps)
        ctx.launches, ctx.layout = _launches(*ctx.settings, dtype, w.dtype, w.device), layout
        unit = torch.empty(w.shape, dtype=dtype, device=w.device, memory_format=layout)
        norms = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
        with device_guard(w):
            ctx.launches[0](rows, unit, norms, stream=raw_stream(w.device), aligned=aligned(rows))
        ctx.save_for_backward(w, norms)
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,), (w, norms) = gradients, ctx.saved_tensors
        *_, scale, eps = ctx.settings
        again = torch.is_grad_enabled()
        if again or not torch._C._has_storage(gradient):
            with torch.enable_grad():
                unit = (w * (scale / filter_norm(w, eps)).view(-1, 1, 1, 1)).to(gradient.dtype)
            return (*torch.autograd.grad(unit, w, gradient, create_graph=again), None, None, None, None)
        rows, gradient = dense(w), gradient.contiguous(memory_format=ctx.layout)
        found = torch.empty_like(rows)
        with device_guard(w):
            ok = aligned(rows, gradient)
            ctx.launches[1](gradient, rows, norms, found, stream=raw_stream(w.device), aligned=ok)
        return found, None, None, None, None


@functools.lru_cache(maxsize=1024)
def _launches(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    last: bool,
    scale: float,
    eps: float,
    *kinds: Any,
) -> tuple[Launch, Launch]:
    """The launches of forward and backward pass, cached by all arguments; `kinds` are dtypes and device."""
    filters, channels, *kernel = shape
    size = channels * kernel[0] * kernel[1]
    flags = {"CHANNELS": channels, "KERNEL": tuple(kernel), "LAST": last}
    forward = Launch(unit_kernel, (filters,), (size, *strides, eps, scale), 4, **flags)
    return forward, Launch(unit_gradient_kernel, (filters,), (size, *strides, scale), 4, **flags)
