"""The fused convolution as autograd meets it in eager mode, without the dispatcher's share of the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from dcnet.equation import conv2d as plain_conv2d
from dcnet.kernels.call import Call, run_backward, run_forward


class Fused(torch.autograd.Function):
    """f(w, x) + bias; the running mean is updated on the way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, settings: tuple[Any, ...], *constants: Tensor
    ) -> Tensor:
        call = Call(x, w, bias, constants, *settings)
        ctx.fused, ctx.settings = call.convolution(in_place=True), settings
        output, *saved = evaluate(call)
        _keep(ctx, call, output, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, w, bias, products, unit, state, *constants = ctx.saved_tensors
        call = Call(x, w, bias, constants, *ctx.settings)
        if torch.is_grad_enabled() or not torch._C._has_storage(gradient):
            return _as_inputs(*differentiable(call, ctx.fused.mean(state), gradient))
        from_output = call.keeps_output
        if ctx.watch is not None and ctx.watch.changed:
            products, from_output = state.new_empty(0), False
        saved, needed = (products, unit, state), ctx.needs_input_grad
        dx, dw, db, found = run_backward(call, ctx.fused, gradient, saved, from_output, *needed[:2])
        return _as_inputs(dx if needed[0] else None, dw if needed[1] else None, None if bias is None else db, *found)


def evaluate(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and what its gradient would need."""
    results = run_forward(call, call.convolution(in_place=True))
    if call.mean == 1 and call.running is not None:
        changed = (call.running, call.tracked)
        torch.autograd.graph.increment_version([tensor for tensor in changed if tensor is not None])
    return results


def _keep(ctx: Any, call: Call, output: Tensor, product: Tensor, unit: Tensor, state: Tensor) -> None:
    """Keeps what the backward needs: the output or the inner products, whichever can be had for less."""
    kept, ctx.watch = watched(output) if call.keeps_output else (product, None)
    ctx.save_for_backward(call.x, call.w, call.bias, kept, unit, state, *call.constants)


class Watch:
    """Tells whether a tensor has been changed in place since, without keeping its memory."""

    def __init__(self, tensor: Tensor):
        # An empty tensor with the version counter of the other.
        self.counter = tensor.detach()
        self.counter.data = tensor.new_empty(0)
        self.version = self.counter._version

    @property
    def changed(self) -> bool:
        return self.counter._version != self.version


def watched(output: Tensor) -> tuple[Tensor, Watch | None]:
    """The output to keep, such that autograd does not object to changes in place, and what tells of them.

    An activation may overwrite it, as after torch's own convolution, which keeps none. While torch.compile traces there
    are no changes in place: what is kept is the value as it is now.
    """
    if isinstance(output, FunctionalTensor):
        return FunctionalTensor.to_functional(output.from_functional()), None
    return (output.data, Watch(output)) if type(output) is Tensor else (output, None)


def _as_inputs(dx: Any, dw: Any, db: Any, *constants: Any) -> tuple[Any, ...]:
    return (dx, dw, db, None, *constants)


def differentiable(call: Call, mean: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """Gradients of input, filters, bias and constants by the equation in torch: they may have gradients themselves."""
    plan, further = call.plan, torch.is_grad_enabled()
    names = [name for i, name in enumerate(plan.names) if i in plan.learned and name is not None]
    window = (call.stride, call.padding, call.dilation, call.groups)
    with torch.enable_grad():
        output = plain_conv2d(
            call.x, call.w.to(call.x.dtype), call.bias, *window, operator=call.operator, eps=call.eps,
            constants=dict(zip(names, call.constants, strict=True)), mean_norm=mean if call.mean == 2 else None,
        )  # fmt: skip
    inputs = [call.x, call.w, call.bias, *call.constants]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=further, allow_unused=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
