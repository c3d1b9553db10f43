"""The arguments of a fused convolution, and the compiled convolution that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels.convolution import Convolution
from dcnet.kernels.passes import Settings
from dcnet.kernels.plan import Plan, Window, plan_of

_compiled: dict[Any, Convolution] = {}

# Images of ever new sizes must not fill the memory with what was compiled for each.
MOST_COMPILED = 4096


class Call(NamedTuple):
    """What a fused convolution is called with; `constants` are the learned ones, as a layer stores them."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    constants: Sequence[Tensor]
    running: Tensor | None
    tracked: Tensor | None
    operator: str
    eps: float
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    mean: int

    @property
    def plan(self) -> Plan:
        return plan_of(self.operator)

    @property
    def window(self) -> Window:
        return Window.of(self.x, self.w, self.stride, self.padding, self.dilation, self.groups)

    @property
    def keeps_output(self) -> bool:
        """Whether the output is kept for the backward in place of the inner products, which can be told from it.

        The next layer mostly keeps it anyway. A bias would drown what is small beside it.
        """
        return self.bias is None and self.plan.invertible

    def convolution(self, in_place: bool) -> Convolution:
        """The convolution for tensors such as these, compiled once; the running mean is updated in place or beside."""
        x, w = self.x, self.w
        tensors = (x, w, self.bias, self.running, self.tracked, *self.constants)
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        layout = (x.shape, x.stride(), w.shape, w.stride(), x.device)
        numbers = (self.eps, tuple(self.stride), tuple(self.padding), tuple(self.dilation), self.groups, self.mean)
        key = (self.operator, dtypes, layout, numbers, in_place)
        if key not in _compiled:
            while len(_compiled) >= MOST_COMPILED:
                _compiled.pop(next(iter(_compiled)))
            _compiled[key] = self._compile(in_place)
        return _compiled[key]

    def _compile(self, in_place: bool) -> Convolution:
        update = 0 if self.running is None or self.mean != 1 else 2 if in_place else 1
        tensors = (self.x.device, self.x.dtype, dense(self.w).stride(), self.bias is not None)
        settings = Settings(*tensors, self.eps, self.mean, update, counted=self.tracked is not None)
        return Convolution(self.plan, self.window, settings)


def dense(w: Tensor) -> Tensor:
    """Filters that lie without gaps, one after the other."""
    without_gaps = w.is_contiguous() or w.is_contiguous(memory_format=torch.channels_last)
    return w if without_gaps else w.contiguous()


def _laid_out(call: Call, fused: Convolution) -> Call:
    """The call with tensors as the kernels expect them, which they mostly are."""
    x, bias = call.x.contiguous(memory_format=fused.window.format), call.bias
    constants = [constant.contiguous() for constant in call.constants]
    bias = bias if bias is None else bias.contiguous()
    w, strides = dense(call.w), fused.passes.settings.weight_strides
    if w.stride() != strides:
        # What was kept for the backward may have been moved, and lie differently since.
        w = torch.empty_strided(w.shape, strides, dtype=w.dtype, device=w.device).copy_(w)
    return call._replace(x=x, w=w, bias=bias, constants=constants)


def run_forward(call: Call, fused: Convolution) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and what the backward needs, on the GPU of the input, in the layout that the kernels expect."""
    call = _laid_out(call, fused)
    with torch.cuda._DeviceGuard(_index(call.x)):
        return fused.forward(call.x, call.w, call.bias, call.constants, call.running, call.tracked)


def run_backward(
    call: Call,
    fused: Convolution,
    gradient: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    from_output: bool,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of input, filters, bias and constants; inner products that were not kept are formed again."""
    products, unit, state = saved
    call, layout = _laid_out(call, fused), fused.window.format
    gradient, unit = gradient.contiguous(memory_format=layout), unit.contiguous(memory_format=layout)
    with torch.cuda._DeviceGuard(_index(call.x)):
        products = products.contiguous(memory_format=layout) if products.numel() else fused.convolve(call.x, unit)
        saved, flags = (products, unit, state), (from_output, needs_input, needs_weight)
        return fused.backward(gradient, call.x, call.w, call.bias, call.constants, saved, *flags)


def _index(x: Tensor) -> int:
    """The number of the GPU, or -1, which changes nothing."""
    return x.device.index if x.is_cuda else -1
