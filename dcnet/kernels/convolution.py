"""The fused convolution: its passes in their order, and what runs beside what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.kernels.launch import aligned
from dcnet.kernels.memory import Memory
from dcnet.kernels.passes import Passes, Settings
from dcnet.kernels.plan import Plan, Window
from dcnet.kernels.streams import Beside, capturing, raw_stream


class Convolution:
    """Forward and backward of one fused convolution.

    What the backward needs of the norms is one tensor: the norms, [group, image, *out], the table of the channels, a
    row for each constant and for a, b and ||w||, and the mean norm with the next running mean and its count.
    """

    def __init__(self, plan: Plan, window: Window, settings: Settings):
        self.plan, self.window, self.passes = plan, window, Passes(plan, window, settings)
        passes, filters = self.passes, window.filters
        self.state = state_memory(plan, window)
        self.forward_scratch = Memory(passes.places, passes.norm_sums)
        sums = passes.back_programs * passes.rows * filters
        self.backward_scratch = Memory(passes.patches, sums, passes.mean_sums, passes.places)
        self.sizes = (window.stride, window.padding, window.dilation, False, (0, 0), window.groups)

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        constants: Sequence[Tensor],
        running: Tensor | None,
        tracked: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, and what the backward needs: inner products, unit filters and state."""
        passes, device, ok = self.passes, x.device, aligned(x, w, bias, running, tracked, *constants)
        state, scratch = self.state.allocate(device), self.forward_scratch.allocate(device)
        norm, table, kept = self.state.places(state)
        squares, sums = self.forward_scratch.places(scratch)
        unit = torch.empty(w.shape, dtype=x.dtype, device=device, memory_format=self.window.format)
        stream = raw_stream(device)
        passes.prepare(x, squares, w, unit, table, self.plan.stored(constants), stream=stream, aligned=ok)
        with Beside(device) as beside:
            passes.norms(squares, norm, sums, stream=raw_stream(device), aligned=True)
        product = self.convolve(x, unit)
        beside.join()
        output = torch.empty_like(product)
        given = (table if bias is None else bias, sums, table if running is None else running)
        count = table if tracked is None else tracked
        passes.apply(product, norm, table, *given, count, output, kept, stream=stream, aligned=ok)
        return output, product, unit, state

    def mean(self, state: Tensor) -> Tensor:
        """The mean norm that the forward pass used."""
        return mean_of(self.plan, self.window, state)

    def convolve(self, x: Tensor, unit: Tensor) -> Tensor:
        """The inner products of all patches with all filters of norm 1."""
        product = torch.ops.aten.convolution.default(x, unit, None, *self.sizes)
        return product.contiguous(memory_format=self.window.format)

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        constants: Sequence[Tensor],
        saved: tuple[Tensor, Tensor, Tensor],
        from_output: bool,
        needs_input: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The gradients of input, filters, bias and stored constants."""
        products, unit, state = saved
        passes, device, ok = self.passes, x.device, aligned(gradient, x, w, bias, products, *constants)
        norm, table, kept = self.state.places(state)
        scratch = self.backward_scratch.allocate(device)
        norm_gradient, sums, mean_sums, factor = self.backward_scratch.places(scratch)
        product_gradient, stream = torch.empty_like(gradient), raw_stream(device)
        outs = (product_gradient, norm_gradient, sums, mean_sums)
        passes.back[from_output](gradient, products, norm, table, kept, *outs, stream=stream, aligned=ok)
        spread = functools.partial(passes.spread, norm, norm_gradient, mean_sums, factor, aligned=True)
        finish = functools.partial(self._finish, w, bias, constants, (table, kept, sums), ok)
        convolved = functools.partial(self._gradients, product_gradient, x, unit)
        if not capturing(device):
            input_gradient, unit_gradient = convolved(needs_input, needs_weight)
            if needs_input:
                spread(stream=stream)
                passes.add(input_gradient, x, factor, stream=stream, aligned=ok)
            return (input_gradient, *finish(unit_gradient if needs_weight else None, stream))
        with Beside(device) as beside:
            if needs_input:
                spread(stream=raw_stream(device))
            spread_done = beside.mark()
            rest = finish(convolved(False, True)[1] if needs_weight else None, raw_stream(device))
        input_gradient = x.new_empty(0)
        if needs_input:
            input_gradient = convolved(True, False)[0]
            beside.wait(spread_done)
            passes.add(input_gradient, x, factor, stream=stream, aligned=ok)
        beside.join()
        return (input_gradient, *rest)

    def _gradients(self, gradient: Tensor, x: Tensor, unit: Tensor, *wanted: bool) -> list[Tensor]:
        """The plain convolution's gradients of its input and of its filters, those that are wanted."""
        if not any(wanted):
            return [x.new_empty(0)] * 2
        found = torch.ops.aten.convolution_backward.default(gradient, x, unit, None, *self.sizes, (*wanted, False))
        return [
            made.contiguous(memory_format=self.window.format) if want else x.new_empty(0)
            for made, want in zip(found, wanted, strict=False)
        ]

    def _finish(
        self,
        w: Tensor,
        bias: Tensor | None,
        constants: Sequence[Tensor],
        known: tuple[Any, ...],
        ok: bool,
        unit_gradient: Tensor | None,
        stream: int | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        plan, given, (table, kept, sums) = self.plan, dict(zip(self.plan.learned, constants, strict=True)), known
        weight_gradient = torch.empty_like(w)
        bias_gradient = w.new_empty(0) if bias is None else torch.empty_like(bias)
        rows = {i: _row_for(given[i], self.window.filters) if i in given else w for i in plan.summed}
        outs = (weight_gradient, bias_gradient, tuple(rows.values()))
        first = w if unit_gradient is None else unit_gradient
        launch = self.passes.finish[unit_gradient is not None]
        launch(first, w, table, kept, plan.stored(constants), sums, *outs, stream=stream, aligned=ok)
        return weight_gradient, bias_gradient, [_as_stored(rows[i], given[i]) for i in plan.learned]


def state_memory(plan: Plan, window: Window) -> Memory:
    """What a state holds: norms, table and means."""
    patches = window.groups * window.batch * window.outs
    return Memory(patches, (len(plan.starts) + 3) * window.filters, 3)


def mean_of(plan: Plan, window: Window, state: Tensor) -> Tensor:
    """The mean norm of a state, a copy."""
    start, _ = state_memory(plan, window).spans[-1]
    return state[start].clone()


def mean_kind(decay: float | None, running: Tensor | None, training: bool) -> int:
    """Which mean norm is meant; see `Settings`."""
    if decay is None:
        return 0
    return 1 if training or running is None else 2


def _row_for(stored: Tensor, filters: int) -> Tensor:
    """Where the kernel writes a constant's gradient, one number a channel, to be summed if all channels share it."""
    return torch.empty(
        filters, dtype=stored.dtype if stored.numel() == filters else torch.float32, device=stored.device
    )


def _as_stored(row: Tensor, stored: Tensor) -> Tensor:
    return row if row.numel() == stored.numel() else row.sum(0, keepdim=True).to(stored.dtype)
