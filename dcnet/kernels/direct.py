"""The fused convolution in plain eager mode: compiled kernels one after another on one stream, with little host time.

The order of the passes is that of `convolution.py`, which also serves first calls, captured graphs, and tensors that
need another layout or alignment. For those, the calls here return None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcnet.kernels.launch import Launch, direct_stream
from dcnet.kernels.passes import IN_PLACE

if TYPE_CHECKING:
    from dcnet.kernels.convolution import Call, Convolution
    from dcnet.kernels.fused_layer import Gradients


def can_run(launches: Sequence[Launch]) -> bool:
    """Whether all launches are compiled."""
    return None not in [launch.runner for launch in launches]


class Direct:
    """What both directions need: sizes, layouts and offsets in bytes."""

    def __init__(self, fused: Convolution):
        window, settings = fused.window, fused.passes.settings
        self.passes, self.plan, self.device, self.dtype = fused.passes, fused.plan, settings.device, settings.dtype
        self.window, self.format = window, window.format
        self.state, self.offsets = fused.state.total, fused.state.offsets
        self.input_strides = strides((window.batch, window.channels, *window.size), self.format)
        self.output_strides = strides((window.batch, window.filters, *window.out), self.format)
        self.filter_shape = (window.filters, window.channels // window.groups, *window.kernel)
        self.unit_strides = strides(self.filter_shape, self.format)
        self.weight_strides = settings.weight_strides

    def small(self, bias: Tensor | None, constants: Sequence[Tensor]) -> tuple[int, list[int]] | None:
        """The addresses of bias and constants; None if one of them is not contiguous."""
        if False in [constant.is_contiguous() for constant in constants]:
            return None
        if bias is None:
            return 0, [constant.data_ptr() for constant in constants]
        return (bias.data_ptr(), [constant.data_ptr() for constant in constants]) if bias.is_contiguous() else None


class DirectForward(Direct):
    """The forward pass of a convolution whose launches are compiled."""

    def __init__(self, fused: Convolution):
        super().__init__(fused)
        self.scratch, (_, self.sums) = fused.forward_scratch.total, fused.forward_scratch.offsets
        self.keeps_output, self.updates = fused.keeps_output, self.passes.settings.update == IN_PLACE

    def __call__(self, call: Call, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """The same as `Convolution.forward`."""
        x, w, bias, constants, running, tracked, *_ = call
        stream, small = direct_stream(self.device), self.small(bias, constants)
        if stream is None or small is None or x.stride() != self.input_strides or w.stride() != self.weight_strides:
            return None
        given, weights, (offset, stored), passes = x.data_ptr(), w.data_ptr(), small, self.passes
        mean, count = 0 if running is None else running.data_ptr(), 0 if tracked is None else tracked.data_ptr()
        if not are_aligned(given, weights, offset, mean, count, *stored):
            return None
        state = torch.empty(self.state, dtype=torch.float32, device=self.device)
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device)
        unit = self._empty_unit(w)
        norm, squares = state.data_ptr(), scratch.data_ptr()
        table, kept, sums = norm + self.offsets[1], norm + self.offsets[2], squares + self.sums
        filters = (weights, unit.data_ptr(), table, self.plan.stored(stored))
        if passes.of_rows:
            passes.prepare_rows.direct(stream, given, norm, sums, *filters)
        else:
            passes.prepare.direct(stream, given, squares, *filters)
            passes.norms.direct(stream, squares, norm, sums)
        product = self.window.convolve(x, unit)
        output = product if self.keeps_output or not keep else torch.empty_like(product)
        means = (offset or table, sums, mean or table, count or table)
        passes.apply.direct(stream, product.data_ptr(), norm, table, *means, output.data_ptr(), kept)
        if self.updates:
            torch._C._increment_version([tensor for tensor in (running, tracked) if tensor is not None])
        return output, product, unit, state

    def _empty_unit(self, w: Tensor) -> Tensor:
        if self.weight_strides == self.unit_strides and w.dtype == self.dtype:
            return torch.empty_like(w)
        return torch.empty_strided(self.filter_shape, self.unit_strides, dtype=self.dtype, device=self.device)


class DirectBackward(Direct):
    """The backward pass of a convolution whose launches are compiled, for input, filters, bias and constants."""

    def __init__(self, fused: Convolution, back: Launch):
        super().__init__(fused)
        self.fused, self.back, self.finish = fused, back, self.passes.finish[True]
        self.scratch, self.scratch_offsets = fused.backward_scratch.total, fused.backward_scratch.offsets

    def __call__(self, call: Call, gradient: Tensor, saved: tuple[Tensor, Tensor, Tensor]) -> Gradients | None:
        """The same as `Convolution.backward`."""
        (x, w, bias, constants, *_), (products, unit, state) = call, saved
        gradient = gradient.contiguous(memory_format=self.format)
        stream, small = direct_stream(self.device), self.small(bias, constants)
        if stream is None or small is None or not self._fits(x, w, gradient, products, unit):
            return None
        start, weights, inputs, kept = gradient.data_ptr(), w.data_ptr(), x.data_ptr(), products.data_ptr()
        norm, (_, table, mean) = state.data_ptr(), self.offsets
        if not are_aligned(start, weights, inputs, kept, norm, small[0], *small[1]):
            return None
        product_gradient = torch.empty_like(gradient)
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device)
        norms, sums, mean_sums, factor = [scratch.data_ptr() + offset for offset in self.scratch_offsets]
        known, passes = (norm + table, norm + mean), self.passes
        self.back.direct(stream, start, kept, norm, *known, product_gradient.data_ptr(), norms, sums, mean_sums)
        input_gradient, unit_gradient = self.window.convolve_backward(product_gradient, x, unit, True, True)
        if passes.of_rows:
            passes.add_rows.direct(stream, input_gradient.data_ptr(), inputs, norm, norms, mean_sums)
        else:
            passes.spread.direct(stream, norm, norms, mean_sums, factor)
            passes.add.direct(stream, input_gradient.data_ptr(), inputs, factor)
        rest = self._finish(stream, (w, bias, constants), (weights, small[1]), (*known, sums), unit_gradient)
        return input_gradient, *rest

    def _fits(self, x: Tensor, w: Tensor, gradient: Tensor, products: Tensor, unit: Tensor) -> bool:
        """Whether the tensors have the layouts of the kernels: saved ones may have been moved to another."""
        outputs = gradient.stride() == self.output_strides == products.stride()
        filters = w.stride() == self.weight_strides and unit.stride() == self.unit_strides
        return outputs and filters and x.stride() == self.input_strides

    def _finish(
        self, stream: int, tensors: tuple[Any, ...], addresses: tuple[Any, ...], known: tuple[int, ...], unit: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The gradients of filters, bias and constants."""
        (w, bias, constants), (weights, stored), (table, kept, sums) = tensors, addresses, known
        weight_gradient, bias_gradient, made = self.fused.new_gradients(w, bias, constants, unit)
        rows = [row.data_ptr() for row in made]
        places = tuple([weights if place is None else rows[place] for place in self.fused.places])
        outs = (weight_gradient.data_ptr(), weights if bias_gradient is None else bias_gradient.data_ptr(), places)
        self.finish.direct(stream, unit.data_ptr(), weights, table, kept, self.plan.stored(stored), sums, *outs)
        return weight_gradient, bias_gradient, self.fused.as_stored(made, constants)


def are_aligned(*addresses: int) -> bool:
    """Whether all addresses are multiples of 16."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % 16 == 0


def strides(shape: Sequence[int], layout: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor of this shape in a memory format."""
    return torch.empty(shape, device="meta", memory_format=layout).stride()
