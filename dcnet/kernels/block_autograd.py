"""The gradient of fused blocks: an autograd function for eager mode, and custom operations for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from dcnet.eager import ConvPatches, Options, decoupled
from dcnet.kernels.activations import FUNCTIONS, PRELU
from dcnet.kernels.block_passes import BATCH_NORM, RUNNING_NORM, BlockSettings
from dcnet.kernels.convolution import Call
from dcnet.kernels.fused_block import (
    BlockGradients,
    Extras,
    FusedBlock,
    Saved,
    fused_block,
    state_memory,
    updated_span,
)
from dcnet.kernels.fused_layer import dense
from dcnet.kernels.passes import NO_UPDATE, RETURNED, RUNNING_MEAN
from dcnet.kernels.plan import MOST_LEARNED

# The tensors of a block that may have a gradient, followed by the learned constants.
_SQUARES, _PRELU, _RESIDUAL, _COUNT = 1, 6, 7, 8


class BlockCall(NamedTuple):
    """The arguments of a fused block."""

    call: Call
    extras: Extras
    settings: BlockSettings

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that may have a gradient."""
        call, extras = self.call, self.extras
        first = (call.x, extras.squares, call.w, call.bias)
        return (*first, extras.gamma, extras.beta, extras.prelu, extras.residual, *call.constants)

    @property
    def others(self) -> tuple[Any, ...]:
        """Buffers and settings: everything but `tensors`."""
        call, extras = self.call, self.extras
        return (call[4:], (extras.running_mean, extras.running_var, extras.batches), self.settings)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], others: tuple[Any, ...]) -> BlockCall:
        x, squares, w, bias, gamma, beta, prelu, residual, *given = tensors
        settings, statistics, block = others
        assert x is not None
        assert w is not None
        call = Call(x, w, bias, [constant for constant in given if constant is not None], *settings)
        return cls(call, Extras(squares, gamma, beta, prelu, residual, *statistics), block)

    def fused(self, in_place: bool) -> FusedBlock:
        return fused_block(self.call, self.extras, self.settings, in_place)


class FusedFunction(torch.autograd.Function):
    """A block in eager mode; updates the running mean norm and the running statistics in place.

    Returns the output, its squares, and the output again: a second user of the output takes that, so that the gradients
    of both arrive apart, and the backward pass adds them while it reads them.
    """

    @staticmethod
    def forward(
        ctx: Any, fused: FusedBlock, others: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = BlockCall.of(tensors, others)
        ctx.fused, ctx.others = fused, others
        output, squares, product, unit, state = fused.block_forward(given.call, given.extras)
        ctx.save_for_backward(*_without(tensors), product, unit, state, output if given.settings.needs_output else None)
        ctx.set_materialize_grads(False)
        return output, squares, output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        *tensors, product, unit, state, output = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(tensors))
        given, needed = BlockCall.of(tensors, ctx.others), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not all(g is None or torch._C._has_storage(g) for g in gradients):
            # Gradients of a batch of losses (`is_grads_batched`) have no storage.
            return (None, None, *differentiable_gradients(given, ctx.fused.mean_of(state), gradients, needed))
        found = ctx.fused.block_backward(
            given.call, given.extras, gradients, Saved(product, unit, state, output), needed[0], needed[2]
        )
        return (None, None, *_arranged(found, tensors, needed))


# torch's own `apply` also prepares for functorch, which never gets here; this one takes less time.
apply_block = super(torch.autograd.Function, FusedFunction).apply


def _without(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that the backward pass needs: the norms replace the squares, and the output the residual."""
    return [None if i in (_SQUARES, _RESIDUAL) else tensor for i, tensor in enumerate(tensors)]


def _arranged(
    found: BlockGradients, tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients in the order of the tensors; None where none is needed."""
    slopes = tensors[_PRELU]
    prelu = found.prelu
    if prelu is not None and slopes is not None and slopes.numel() == 1:
        prelu = prelu.float().sum(0, keepdim=True).to(slopes.dtype)
    values = (found.x, found.squares, found.w, found.bias, found.gamma, found.beta, prelu, found.residual)
    return tuple(value if want else None for value, want in zip((*values, *found.constants), needed, strict=True))


def differentiable_gradients(
    given: BlockCall, mean: Tensor, gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients in eager PyTorch, which can be differentiated again; that of the squares is part of the input's."""
    if given.settings.residual:
        raise RuntimeError(
            "the gradient of a fused block with a residual can neither be differentiated again nor computed for many "
            "losses at once: call dcnet.unfuse(model) before you use create_graph=True or is_grads_batched=True"
        )
    with torch.enable_grad():
        output = _output(given, mean)
        outputs = [output, output.float().square().sum(1), output]
    present = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    tensors = [tensor if want else None for tensor, want in zip(given.tensors, needed, strict=True)]
    wanted = [tensor for tensor in tensors if tensor is not None]
    outs, cotangents = zip(*present, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, cotangents, create_graph=True, allow_unused=True))
    return tuple(None if tensor is None else next(found) for tensor in tensors)


def _output(given: BlockCall, mean: Tensor) -> Tensor:
    """The output of the block in eager PyTorch, without updates of running statistics."""
    call, extras, settings = given
    names = [name for i, name in enumerate(call.plan.names) if i in call.plan.learned and name is not None]
    options: Options = {
        "operator": call.operator,
        "eps": call.eps,
        "constants": dict(zip(names, call.constants, strict=True)),
        "mean_norm": mean if call.mean == RUNNING_MEAN else None,
    }
    w = call.w.to(call.x.dtype)
    patches = ConvPatches(2, call.x, w, call.stride, call.padding, call.dilation, call.groups)
    output = decoupled(patches, w, call.bias, options)
    if settings.norm == BATCH_NORM:
        output = F.batch_norm(output, None, None, extras.gamma, extras.beta, training=True, eps=settings.eps)
    if settings.norm == RUNNING_NORM:
        statistics = (extras.running_mean, extras.running_var)
        output = F.batch_norm(output, *statistics, extras.gamma, extras.beta, eps=settings.eps)
    if settings.activation == PRELU:
        assert extras.prelu is not None
        return F.prelu(output, extras.prelu.to(output.dtype))
    activation = FUNCTIONS.get(settings.activation)
    return output if activation is None else activation(output)


_CONSTANTS = ", ".join(f"Tensor? constant_{i}" for i in range(MOST_LEARNED))
_ARGUMENTS = (
    "Tensor x, Tensor? squares, Tensor w, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? prelu, Tensor? residual, "
    f"{_CONSTANTS}, Tensor? running, Tensor? tracked, Tensor? running_mean, Tensor? running_var, Tensor? batches, "
    "str operator, float eps, SymInt[] stride, SymInt[] padding, SymInt[] dilation, int mean, int norm, "
    "float norm_eps, float? momentum, bool update, int activation, bool hands_on"
)
_ARGUMENTS_COUNT = _COUNT + MOST_LEARNED + 5 + 12
_LIBRARY = Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    f"block({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.define(
    f"block_backward({_ARGUMENTS}, Tensor? gradient, Tensor? squares_gradient, Tensor product, Tensor unit, "
    "Tensor state, Tensor? output, bool needs_input, bool needs_weight) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def arguments_of(given: BlockCall) -> tuple[Any, ...]:
    """The call as the arguments of the custom operation."""
    call, extras, settings = given
    constants = (*call.constants, *(None,) * (MOST_LEARNED - len(call.constants)))
    buffers = (call.running, call.tracked, extras.running_mean, extras.running_var, extras.batches)
    numbers = (call.operator, call.eps, call.stride, call.padding, call.dilation, call.mean)
    block = (settings.norm, settings.eps, settings.momentum, settings.update != NO_UPDATE, settings.activation)
    return (*given.tensors[:_COUNT], *constants, *buffers, *numbers, *block, settings.hands_on)


def _call_of(arguments: Sequence[Any]) -> BlockCall:
    tensors, buffers = arguments[: _COUNT + MOST_LEARNED], arguments[_COUNT + MOST_LEARNED :][:5]
    operator, eps, stride, padding, dilation, mean, norm, norm_eps, momentum, update, activation, hands_on = arguments[
        _COUNT + MOST_LEARNED + 5 :
    ]
    _, squares, w, bias, gamma, _, prelu, residual = tensors[:_COUNT]
    running, tracked, *statistics = buffers
    settings = BlockSettings(
        norm=norm,
        eps=norm_eps,
        momentum=momentum,
        update=RETURNED if update else NO_UPDATE,
        affine=gamma is not None,
        bias=bias is not None,
        activation=activation,
        shared=prelu is not None and prelu.numel() == 1 and w.shape[0] != 1,
        residual=residual is not None,
        given=squares is not None,
        hands_on=hands_on,
    )
    others = ((running, tracked, operator, eps, stride, padding, dilation, 1, mean), tuple(statistics), settings)
    return BlockCall.of(tensors, others)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = _call_of(arguments)
    fused = given.fused(in_place=False)
    output, squares, product, unit, state = fused.block_forward(given.call, given.extras)
    return output, state.new_empty(0) if squares is None else squares, product, unit, state, fused.updated(state)


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    given = _call_of(arguments)
    call, window = given.call, given.call.window
    memory, floats = state_memory(call.plan, window, given.settings), call.x.new_empty(0, dtype=torch.float32)
    output = window.empty_output(call.x)
    squares = floats.new_empty((window.batch, *window.out) if given.settings.hands_on else 0)
    unit = torch.empty_like(call.w, dtype=call.x.dtype, memory_format=window.format)
    size = updated_span(memory)[1]
    return output, squares, torch.empty_like(output), unit, floats.new_empty(memory.total), floats.new_empty(size)


def _backward(*arguments: Any) -> list[Tensor]:
    given, (*rest, needs_input, needs_weight) = _call_of(arguments[:_ARGUMENTS_COUNT]), arguments[_ARGUMENTS_COUNT:]
    gradient, squares_gradient, *saved = rest
    found = given.fused(in_place=False).block_backward(
        given.call, given.extras, (gradient, squares_gradient, None), Saved(*saved), needs_input, needs_weight
    )
    values = _arranged(found, given.tensors, [True] * len(given.tensors))
    return [given.call.x.new_empty(0) if value is None else value for value in values]


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    given, needs = _call_of(arguments[:_ARGUMENTS_COUNT]), arguments[-2:]
    call, empty = given.call, given.call.x.new_empty(0)
    found = [empty if tensor is None else torch.empty_like(tensor) for tensor in given.tensors]
    found[0] = torch.empty_like(call.x, memory_format=call.window.format) if needs[0] else empty
    found[2] = torch.empty_like(dense(call.w))
    if given.settings.given:
        found[_SQUARES] = call.x.new_empty((call.x.shape[0], *call.x.shape[2:]), dtype=torch.float32)
    if given.settings.residual:
        found[_RESIDUAL] = call.window.empty_output(call.x)
    return found


class _Operation(torch.autograd.Function):
    """A block as a custom operation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            output, squares, product, unit, state, updated = torch.ops.dcnet.block.default(*arguments)
        ctx.set_materialize_grads(False)
        ctx.has_squares, ctx.has_residual = arguments[_SQUARES] is not None, arguments[_RESIDUAL] is not None
        ctx.others = arguments[_COUNT + MOST_LEARNED :]
        ctx.mark_non_differentiable(product, unit, state, updated)
        saved = (product, unit, state, output if _call_of(arguments).settings.needs_output else None)
        ctx.save_for_backward(*_without(arguments[: _COUNT + MOST_LEARNED]), *saved)
        return output, squares, product, unit, state, updated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        *tensors, product, unit, state, output = ctx.saved_tensors
        none = (None,) * _ARGUMENTS_COUNT
        if gradients[0] is None and gradients[1] is None:
            return none
        # The backward pass needs the presence of squares and residual only, not their values.
        tensors[_SQUARES] = state if ctx.has_squares else None
        tensors[_RESIDUAL] = product if ctx.has_residual else None
        needed = ctx.needs_input_grad
        found = torch.ops.dcnet.block_backward.default(
            *tensors, *ctx.others, *gradients[:2], product, unit, state, output, needed[0], needed[2]
        )
        found = [value if want else None for value, want in zip(found, needed, strict=False)]
        return (*found, *none[len(found) :])


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(given, Tensor) and given.requires_grad for given in arguments):
        return _Operation.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dcnet.block.default(*arguments)


def _autocast(x: Tensor, *rest: Any) -> Any:
    """Casts the input; the kernels read parameters in their own dtype."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        return torch.ops.dcnet.block.default(x.to(torch.get_autocast_dtype("cuda")), *rest)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("block", _forward, _key)
    _LIBRARY.impl("block_backward", _backward, _key)
_LIBRARY.impl("block", _autograd, "Autograd")
_LIBRARY.impl("block", _autocast, "AutocastCUDA")
torch.library.register_fake("dcnet::block", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("dcnet::block_backward", _backward_shapes, lib=_LIBRARY)
