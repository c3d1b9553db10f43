"""The fused convolution as operations of torch, for whatever traces: torch.compile, export, modes, autocast.

`dcnet::conv2d` gives the output, what its gradient needs, and the next running mean with its count;
`dcnet::conv2d_backward` gives the gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from dcnet.kernels.autograd import differentiable, watched
from dcnet.kernels.call import Call, dense, run_backward, run_forward
from dcnet.kernels.convolution import mean_of, state_memory
from dcnet.kernels.plan import MOST_LEARNED

# Lists of tensors would take torch longer than all the rest; so each learned constant has an argument of its own.
_CONSTANTS = ", ".join(f"Tensor? constant_{i}" for i in range(MOST_LEARNED))
_ARGUMENTS = (
    f"Tensor x, Tensor w, Tensor? bias, {_CONSTANTS}, Tensor? running, Tensor? tracked, str operator, float eps, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, int mean"
)
_COUNT = 3 + MOST_LEARNED + 9
_LIBRARY = Library("dcnet", "DEF")
_LIBRARY.define(
    f"conv2d({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.define(
    f"conv2d_backward({_ARGUMENTS}, Tensor gradient, Tensor products, Tensor unit, Tensor state, "
    "bool from_output, bool needs_input, bool needs_weight) -> (Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def flat(call: Call) -> tuple[Any, ...]:
    """The call as the operations take it."""
    x, w, bias, constants, *settings = call
    return (x, w, bias, *constants, *(None,) * (MOST_LEARNED - len(constants)), *settings)


def _call(arguments: Sequence[Any]) -> Call:
    x, w, bias, *rest = arguments
    return Call(x, w, bias, [given for given in rest[:MOST_LEARNED] if given is not None], *rest[MOST_LEARNED:])


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = _call(arguments)
    fused = call.convolution(in_place=False)
    output, product, unit, state = run_forward(call, fused)
    updated = fused.state.places(state)[-1].tensor()[1:].clone()
    return output, call.x.new_empty(0) if call.keeps_output else product, unit, state, updated


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call = _call(arguments[:_COUNT])
    gradient, products, unit, state, *flags = arguments[_COUNT:]
    return run_backward(call, call.convolution(in_place=False), gradient, (products, unit, state), *flags)


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    call = _call(arguments)
    x, window = call.x, call.window
    output = torch.empty(
        (window.batch, window.filters, *window.out), dtype=x.dtype, device=x.device, memory_format=window.format
    )
    product = x.new_empty(0) if call.keeps_output else torch.empty_like(output)
    unit = torch.empty(call.w.shape, dtype=x.dtype, device=x.device, memory_format=window.format)
    state = x.new_empty(state_memory(call.plan, window).total, dtype=torch.float32)
    return output, product, unit, state, state.new_empty(2)


def _backward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call, needs_input = _call(arguments[:_COUNT]), arguments[-2]
    x = call.x
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=call.window.format)
    return (
        dx if needs_input else x.new_empty(0),
        torch.empty_like(dense(call.w)),
        call.w.new_empty(0) if call.bias is None else torch.empty_like(call.bias),
        [torch.empty_like(constant) for constant in call.constants],
    )


class _Traced(torch.autograd.Function):
    """The gradient of the operation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output, product, unit, state, updated = torch.ops.dcnet.conv2d.default(*arguments)
        call = _call(arguments)
        ctx.mark_non_differentiable(product, unit, state, updated)
        ctx.set_materialize_grads(False)
        ctx.settings = (None, *arguments[5 + MOST_LEARNED :])
        kept, ctx.watch = watched(output) if call.keeps_output else (product, None)
        # The batch's own mean is in the state, and the running one is about to be changed.
        running = call.running if call.mean == 2 else None
        ctx.save_for_backward(*arguments[: 3 + MOST_LEARNED], running, kept, unit, state)
        return output, product, unit, state, updated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gradient, tensors = gradients[0], ctx.saved_tensors
        if gradient is None:
            return (None,) * _COUNT
        arguments = (*tensors[: 4 + MOST_LEARNED], *ctx.settings)
        products, unit, state = tensors[4 + MOST_LEARNED :]
        call = _call(arguments)
        if type(gradient) is Tensor and (torch.is_grad_enabled() or not torch._C._has_storage(gradient)):
            return _as_inputs(*differentiable(call, mean_of(call.plan, call.window, state), gradient))
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        from_output = call.keeps_output
        if ctx.watch is not None and ctx.watch.changed:
            products, from_output = unit.new_empty(0), False
        dx, dw, db, found = torch.ops.dcnet.conv2d_backward.default(
            *arguments, gradient, products, unit, state, from_output, needs_input, needs_weight
        )
        given = (dx if needs_input else None, dw if needs_weight else None, None if arguments[2] is None else db)
        return _as_inputs(*given, *found)


def _as_inputs(*gradients: Tensor | None) -> tuple[Any, ...]:
    return (*gradients, *(None,) * (_COUNT - len(gradients)))


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(given, Tensor) and given.requires_grad for given in arguments):
        return _Traced.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dcnet.conv2d.default(*arguments)


def _autocast(x: Tensor, *rest: Any) -> Any:
    """Casts the input; filters and constants are read as they are."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        return torch.ops.dcnet.conv2d.default(x.to(torch.get_autocast_dtype("cuda")), *rest)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("conv2d", _forward, _key)
    _LIBRARY.impl("conv2d_backward", _backward, _key)
_LIBRARY.impl("conv2d", _autograd, "Autograd")
_LIBRARY.impl("conv2d", _autocast, "AutocastCUDA")
torch.library.register_fake("dcnet::conv2d", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("dcnet::conv2d_backward", _backward_shapes, lib=_LIBRARY)
