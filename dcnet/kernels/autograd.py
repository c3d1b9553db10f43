"""The gradient of the fused convolution: an autograd function for eager mode, and custom operations for compilers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import Library

from dcnet.eager import ConvPatches, Options, decoupled
from dcnet.kernels.convolution import Call, Convolution
from dcnet.kernels.depthwise import Depthwise, unit_shape
from dcnet.kernels.fused_layer import dense, mean_of, state_memory
from dcnet.kernels.passes import RUNNING_MEAN
from dcnet.kernels.plan import MOST_LEARNED


class Fused(torch.autograd.Function):
    """f(w, x) + bias in eager mode, without the overhead of the dispatcher; updates the running mean in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        fused: Convolution | Depthwise,
        others: list[Any],
        *constants: Tensor,
    ) -> Tensor:
        """`others` are the arguments of the call after the constants."""
        return run_forward(ctx, (x, w, bias, constants), Call(x, w, bias, constants, *others), fused, others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, w, bias, products, unit, state, *constants = ctx.saved_tensors
        call = Call(x, w, bias, constants, *ctx.others)
        dx, dw, db, found = run_backward(ctx, call, gradients[0], (products, unit, state))
        return (dx, dw, db, None, None, *found)


class FusedRows(torch.autograd.Function):
    """As `Fused`, for rows [..., in] and filters [out, in]: it views both as images, so that autograd does not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        fused: Convolution,
        others: list[Any],
        *constants: Tensor,
    ) -> Tensor:
        call = Call(as_image(x), w.view(*w.shape, 1, 1), bias, constants, *others)
        return as_rows(run_forward(ctx, (x, w, bias, constants), call, fused, others), x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, w, bias, products, unit, state, *constants = ctx.saved_tensors
        call = Call(as_image(x), w.view(*w.shape, 1, 1), bias, constants, *ctx.others)
        dx, dw, db, found = run_backward(ctx, call, as_image(gradients[0]), (products, unit, state))
        dx = None if dx is None else as_rows(dx, x.shape[:-1])
        return (dx, None if dw is None else dw.reshape(w.shape), db, None, None, *found)


def as_image(rows: Tensor) -> Tensor:
    """Rows [..., C] as the pixels of one image of height 1, with its channels last."""
    return rows.reshape(1, 1, -1, rows.shape[-1]).permute(0, 3, 1, 2)


def as_rows(image: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `as_image`, for rows of the given leading shape."""
    return image.permute(0, 2, 3, 1).reshape(*shape, image.shape[1])


# torch's own `apply` also prepares for functorch, which never gets here; this one takes less time.
apply_fused = super(torch.autograd.Function, Fused).apply
apply_fused_rows = super(torch.autograd.Function, FusedRows).apply


def run_forward(
    ctx: Any, given: tuple[Any, ...], call: Call, fused: Convolution | Depthwise, others: list[Any]
) -> Tensor:
    """The output; saves the `given` tensors and what the backward pass needs."""
    x, w, bias, constants = given
    ctx.fused, ctx.others = fused, others
    output, product, unit, state = fused.forward(call)
    kept, ctx.version = without_version_check(output) if fused.keeps_output else (product, None)
    ctx.save_for_backward(x, w, bias, kept, unit, state, *constants)
    return output


def run_backward(
    ctx: Any, call: Call, gradient: Tensor, saved: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Sequence[Tensor | None]]:
    """The gradients of input, filters, bias and constants."""
    products, unit, state = saved
    if torch.is_grad_enabled() or not torch._C._has_storage(gradient):
        mean = mean_of(call.plan, call.window, state)
        dx, dw, db, *found = differentiable_gradients(call, mean, gradient)
        return dx, dw, db, found
    products, from_output = _usable(products, ctx.version, ctx.fused.keeps_output)
    needed = ctx.needs_input_grad
    dx, dw, db, made = ctx.fused.backward(call, gradient, (products, unit, state), from_output, *needed[:2])
    return dx if needed[0] else None, dw if needed[1] else None, db, made


class Version:
    """Detects in-place changes of a tensor without keeping its memory."""

    def __init__(self, tensor: Tensor):
        # An empty tensor that shares the version counter.
        self.counter = tensor.detach()
        self.counter.data = _empty(tensor.dtype, tensor.device)
        self.version = self.counter._version

    @property
    def changed(self) -> bool:
        return self.counter._version != self.version


@functools.lru_cache(maxsize=64)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def without_version_check(output: Tensor) -> tuple[Tensor, Version | None]:
    """The output in a form that autograd allows to be changed in place, and a `Version` that detects such changes.

    An in-place activation may overwrite the output, as it may after torch's convolution, which saves no output. While
    torch.compile traces there are no in-place changes: the saved value is the current one.
    """
    if isinstance(output, FunctionalTensor):
        return FunctionalTensor.to_functional(output.from_functional()), None
    return (output.data, Version(output)) if type(output) is Tensor else (output, None)


def _usable(saved: Tensor, version: Version | None, is_output: bool) -> tuple[Tensor, bool]:
    """The saved tensor, empty if it was overwritten since, and whether it is the output."""
    if version is not None and version.changed:
        return saved.new_empty(0), False
    return saved, is_output


def differentiable_gradients(call: Call, mean: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """Gradients of input, filters, bias and constants in eager PyTorch, which can be differentiated again."""
    plan, further = call.plan, torch.is_grad_enabled()
    names = [name for i, name in enumerate(plan.names) if i in plan.learned and name is not None]
    options: Options = {
        "operator": call.operator,
        "eps": call.eps,
        "constants": dict(zip(names, call.constants, strict=True)),
        "mean_norm": mean if call.mean == RUNNING_MEAN else None,
    }
    with torch.enable_grad():
        w = call.w.to(call.x.dtype)
        patches = ConvPatches(2, call.x, w, call.stride, call.padding, call.dilation, call.groups)
        output = decoupled(patches, w, call.bias, options)
    inputs = [call.x, call.w, call.bias, *call.constants]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=further, allow_unused=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


# One argument per learned constant: torch would need more time for a list of tensors than for everything else.
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


def arguments_of(call: Call) -> tuple[Any, ...]:
    """The call as the arguments of the custom operation."""
    x, w, bias, constants, *settings = call
    return (x, w, bias, *constants, *(None,) * (MOST_LEARNED - len(constants)), *settings)


def _call_of(arguments: Sequence[Any]) -> Call:
    x, w, bias, *rest = arguments
    return Call(x, w, bias, [given for given in rest[:MOST_LEARNED] if given is not None], *rest[MOST_LEARNED:])


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = _call_of(arguments)
    fused = call.convolution(in_place=False)
    output, product, unit, state = fused.forward(call)
    updated = fused.state.places(state)[-1].tensor()[1:].clone()
    return output, call.x.new_empty(0) if call.keeps_output else product, unit, state, updated


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call = _call_of(arguments[:_COUNT])
    gradient, products, unit, state, *flags = arguments[_COUNT:]
    dx, dw, db, found = call.convolution(in_place=False).backward(call, gradient, (products, unit, state), *flags)
    return dx, dw, dw.new_empty(0) if db is None else db, found


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    call = _call_of(arguments)
    x, window = call.x, call.window
    output = window.empty_output(x)
    product = x.new_empty(0) if call.keeps_output or window.depthwise else torch.empty_like(output)
    if window.depthwise:
        unit = x.new_empty(unit_shape(window), dtype=torch.float32)
    else:
        unit = torch.empty(call.w.shape, dtype=x.dtype, device=x.device, memory_format=window.format)
    state = x.new_empty(state_memory(call.plan, window).total, dtype=torch.float32)
    return output, product, unit, state, state.new_empty(2)


def _backward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call, needs_input = _call_of(arguments[:_COUNT]), arguments[-2]
    x = call.x
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=call.window.format)
    return (
        dx if needs_input else x.new_empty(0),
        torch.empty_like(dense(call.w)),
        call.w.new_empty(0) if call.bias is None else torch.empty_like(call.bias),
        [torch.empty_like(constant) for constant in call.constants],
    )


class _Operation(torch.autograd.Function):
    """The gradient of the custom operation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output, product, unit, state, updated = torch.ops.dcnet.conv2d.default(*arguments)
        call = _call_of(arguments)
        ctx.mark_non_differentiable(product, unit, state, updated)
        ctx.set_materialize_grads(False)
        ctx.settings = (None, *arguments[5 + MOST_LEARNED :])
        kept, ctx.version = without_version_check(output) if call.keeps_output else (product, None)
        # The batch mean is in the state; the running mean is about to change.
        running = call.running if call.mean == RUNNING_MEAN else None
        ctx.save_for_backward(*arguments[: 3 + MOST_LEARNED], running, kept, unit, state)
        return output, product, unit, state, updated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gradient, tensors = gradients[0], ctx.saved_tensors
        if gradient is None:
            return (None,) * _COUNT
        arguments = (*tensors[: 4 + MOST_LEARNED], *ctx.settings)
        products, unit, state = tensors[4 + MOST_LEARNED :]
        call = _call_of(arguments)
        if type(gradient) is Tensor and (torch.is_grad_enabled() or not torch._C._has_storage(gradient)):
            found = differentiable_gradients(call, mean_of(call.plan, call.window, state), gradient)
        else:
            needed = ctx.needs_input_grad[:2]
            products, from_output = _usable(products, ctx.version, call.keeps_output)
            dx, dw, db, constants = torch.ops.dcnet.conv2d_backward.default(
                *arguments, gradient, products, unit, state, from_output, *needed
            )
            db = None if call.bias is None else db
            found = [dx if needed[0] else None, dw if needed[1] else None, db, *constants]
        return (*found, *(None,) * (_COUNT - len(found)))


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(given, Tensor) and given.requires_grad for given in arguments):
        return _Operation.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dcnet.conv2d.default(*arguments)


def _autocast(x: Tensor, *rest: Any) -> Any:
    """Casts the input; the kernels read filters and constants in their own dtype."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        return torch.ops.dcnet.conv2d.default(x.to(torch.get_autocast_dtype("cuda")), *rest)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("conv2d", _forward, _key)
    _LIBRARY.impl("conv2d_backward", _backward, _key)
_LIBRARY.impl("conv2d", _autograd, "Autograd")
_LIBRARY.impl("conv2d", _autocast, "AutocastCUDA")
torch.library.register_fake("dcnet::conv2d", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("dcnet::conv2d_backward", _backward_shapes, lib=_LIBRARY)
