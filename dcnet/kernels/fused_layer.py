"""The common part of all fused convolutions: the memory of their state, layouts, gradients of filters and constants."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcnet.kernels.launch import Memory
from dcnet.kernels.passes import FilterPasses
from dcnet.kernels.plan import Plan, Window

if TYPE_CHECKING:
    from dcnet.kernels.convolution import Call

# The gradients of filters, bias and stored constants; and those after the gradient of the input.
Rest = tuple[Tensor, Tensor | None, list[Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor | None, list[Tensor]]


class FusedLayer:
    """The part of a fused convolution that does not depend on how inner products are computed."""

    plan: Plan
    window: Window
    passes: FilterPasses

    @functools.cached_property
    def places(self) -> list[int | None]:
        """For every sum over positions, the learned constant that it belongs to."""
        plan = self.plan
        return [plan.learned.index(i) if i in plan.learned else None for i in plan.summed]

    def laid_out(self, call: Call) -> Call:
        """The call with its tensors in the layout that the kernels expect, which they usually have already."""
        x, w, bias, constants, *_ = call
        strides, small = self.passes.settings.weight_strides, (bias, *constants)
        arranged = x.is_contiguous(memory_format=self.window.format) and w.stride() == strides
        if arranged and False not in [tensor is None or tensor.is_contiguous() for tensor in small]:
            return call
        x, w = x.contiguous(memory_format=self.window.format), dense(w)
        bias = bias if bias is None else bias.contiguous()
        if w.stride() != strides:
            # Since the forward pass, the saved filters may have been moved to another layout.
            w = torch.empty_strided(w.shape, strides, dtype=w.dtype, device=w.device).copy_(w)
        return call._replace(x=x, w=w, bias=bias, constants=[constant.contiguous() for constant in constants])

    def finish(
        self,
        w: Tensor,
        bias: Tensor | None,
        constants: Sequence[Tensor],
        known: tuple[Any, ...],
        ok: bool,
        unit_gradient: Tensor | None,
        stream: int | None,
    ) -> Rest:
        """Gradients of filters, bias and stored constants."""
        table, kept, sums = known
        weight_gradient, bias_gradient, made = self.new_gradients(w, bias, constants, unit_gradient)
        rows = tuple([w if place is None else made[place] for place in self.places])
        outs = (weight_gradient, w if bias_gradient is None else bias_gradient, rows)
        first, launch = w if unit_gradient is None else unit_gradient, self.passes.finish[unit_gradient is not None]
        launch(first, w, table, kept, self.plan.stored(constants), sums, *outs, stream=stream, aligned=ok)
        return weight_gradient, bias_gradient, self.as_stored(made, constants)

    def new_gradients(
        self, w: Tensor, bias: Tensor | None, constants: Sequence[Tensor], unit_gradient: Tensor | None
    ) -> Rest:
        """Memory for the gradients of filters and bias, and for one row of gradients per constant.

        The gradient of the filters shares memory with that of the normalized filters if dtype and layout are the same.
        """
        weight_gradient = unit_gradient
        if weight_gradient is None or weight_gradient.dtype != w.dtype or weight_gradient.stride() != w.stride():
            weight_gradient = torch.empty_like(w)
        made = [_row_for(constant, self.window.filters) for constant in constants]
        return weight_gradient, None if bias is None else torch.empty_like(bias), made

    def as_stored(self, rows: Sequence[Tensor], constants: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the constants: a row, or its sum if all channels share the constant."""
        return [
            row if row.numel() == constant.numel() else row.sum(0, keepdim=True).to(constant.dtype)
            for row, constant in zip(rows, constants, strict=True)
        ]


def state_memory(plan: Plan, window: Window) -> Memory:
    """The layout of the state: norms, except of depthwise convolutions, channel table and mean norms."""
    patches = 0 if window.depthwise else window.groups * window.batch * window.outs
    return Memory(patches, (len(plan.starts) + 3) * window.filters, 3)


def mean_of(plan: Plan, window: Window, state: Tensor) -> Tensor:
    """A copy of the mean norm that the forward pass used."""
    start, _ = state_memory(plan, window).spans[-1]
    return state[start].clone()


def keeps_output(plan: Plan, window: Window, has_bias: bool) -> bool:
    """Whether the backward pass gets the output, from which it computes the inner products.

    The next layer usually keeps the output anyway. With a bias, small values could not be recovered from it. Depthwise
    convolutions compute their inner products again.
    """
    return plan.invertible and not has_bias and not window.depthwise


def _row_for(stored: Tensor, filters: int) -> Tensor:
    """A buffer for a constant's gradient per channel; `as_stored` sums it if all channels share the constant."""
    if stored.numel() == filters:
        return torch.empty_like(stored)
    return torch.empty(filters, dtype=torch.float32, device=stored.device)


def dense(w: Tensor) -> Tensor:
    """The filters without gaps in memory; copied only if there are gaps."""
    without_gaps = w.is_contiguous() or w.is_contiguous(memory_format=torch.channels_last)
    return w if without_gaps else w.contiguous()
