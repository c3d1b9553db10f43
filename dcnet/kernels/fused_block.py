"""Fused blocks: the order of the passes of convolution, batch normalization, residual and activation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels.block_passes import BATCH_NORM, ROWS, BlockPasses, BlockSettings
from dcnet.kernels.convolution import MOST_COMPILED, Call, Convolution, Steps
from dcnet.kernels.fused_layer import dense
from dcnet.kernels.launch import Memory, Place, aligned, device_guard, kinds_of, raw_stream, side_stream
from dcnet.kernels.passes import BATCH_MEAN, IN_PLACE, NO_UPDATE, RETURNED, Settings
from dcnet.kernels.plan import Plan, Window


class Extras(NamedTuple):
    """The tensors of a block besides those of its convolution."""

    squares: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    prelu: Tensor | None = None
    residual: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    batches: Tensor | None = None


class Saved(NamedTuple):
    """What a block keeps for its backward pass; the output only if it has a residual."""

    product: Tensor
    unit: Tensor
    state: Tensor
    output: Tensor | None


class Places(NamedTuple):
    """The places of a forward pass, in the state and in the scratch memory."""

    state: list[Place]
    scratch: list[Place]


class OutputGradients(NamedTuple):
    """The gradients of the output by its one or two users, and of its squares."""

    users: list[Tensor]
    squares: Tensor | None


class FusedBlock(Convolution):
    """Forward and backward pass of one block, compiled for one operator, shape, layout and dtype.

    The backward pass needs the state of the convolution and the rows of the block. If the new running statistics are
    returned, they follow the rows.
    """

    passes: BlockPasses

    def __init__(self, plan: Plan, window: Window, settings: Settings, block: BlockSettings):
        self.plan, self.window, self.block = plan, window, block
        self.passes = passes = BlockPasses(plan, window, settings, block)
        self.state, filters = state_memory(plan, window, block), window.filters
        squares = 0 if block.given or plan.cancels else passes.places
        partial = (2 * passes.statistic_programs + 1) * filters * (block.norm == BATCH_NORM)
        self.forward_scratch = Memory(squares, passes.norm_sums, partial)
        sums = passes.back_programs * passes.rows * filters
        partial = passes.sum_programs * passes.sum_rows * filters * block.has_sums
        self.backward_scratch = Memory(passes.patches, sums, passes.mean_sums, passes.places, partial, 2 * filters)
        self.gather()

    def _prepare(self, w: Tensor, constants: Sequence[Tensor], places: Places) -> Tensor:
        """The normalized filters; fills the channel table in the state."""
        w, device, dtype = dense(w), w.device, self.passes.settings.dtype
        unit = torch.empty(w.shape, dtype=dtype, device=device, memory_format=self.window.format)
        norm, table, *_ = places.state
        stored, ok = self.plan.stored(constants), aligned(w, *constants)
        self.passes.filters(unit, norm, w, unit, table, stored, stream=raw_stream(device), aligned=ok)
        return unit

    def block_forward(
        self, call: Call, extras: Extras, overwrite: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """The output and its sums of squares; and for the backward pass: inner products, unit filters and state.

        With `overwrite`, the output takes the memory of the inner products.
        """
        call, extras = self.laid_out(call), self._arranged(extras)
        ok = aligned(call.x, call.w, call.bias, call.running, call.tracked, *call.constants, *extras)
        with device_guard(call.x):
            state, scratch = self.state.allocate(call.x.device), self.forward_scratch.allocate(call.x.device)
            places = Places(self.state.places(state), self.forward_scratch.places(scratch))
            unit = self._prepare(call.w, call.constants, places)
            product = self._convolve(call, extras, unit, places, ok)
            output = product if overwrite else torch.empty_like(product)
            onward = self._finish_output(call, extras, (product, output), places, ok)
        self._note_updates(call, extras)
        return output, onward, product, unit, state

    def _convolve(self, call: Call, extras: Extras, unit: Tensor, places: Places, ok: bool) -> Tensor:
        """The inner products; concurrently, the norms, and the rows of a block that needs no statistics."""
        x, passes, norm = call.x, self.passes, places.state[0]
        squares, sums, _ = places.scratch
        given = squares if extras.squares is None else extras.squares
        if extras.squares is None and not self.plan.cancels:
            passes.squares(x, squares, stream=raw_stream(x.device), aligned=ok)
        with side_stream(x.device) as side:
            if self.plan.cancels:
                norm.tensor().fill_(1)
            else:
                passes.norms(given, norm, sums, stream=raw_stream(x.device), aligned=ok)
            if self.block.has_rows and self.block.norm != BATCH_NORM:
                self._make_rows(call.bias, extras, places, ok)
        product = self.window.convolve(x, unit)
        side.join()
        return product

    def _finish_output(
        self, call: Call, extras: Extras, tensors: tuple[Tensor, Tensor], places: Places, ok: bool
    ) -> Tensor | None:
        """Fills the output from the inner products; returns its sums of squares."""
        (product, output), passes = tensors, self.passes
        (norm, table, kept, _, rows), (_, sums, partial) = places
        stream = raw_stream(product.device)
        buffered = [table if buffer is None else buffer for buffer in (call.running, call.tracked)]
        means = (sums, *buffered, kept)
        if self.block.norm == BATCH_NORM:
            batches = table if extras.batches is None else extras.batches
            passes.statistics(product, norm, table, *means, batches, partial, stream=stream, aligned=ok)
            self._make_rows(call.bias, extras, places, ok)
        residual, onward = output if extras.residual is None else extras.residual, self._empty_squares(output)
        outs = (residual, output, table if onward is None else onward)
        passes.output(product, norm, table, *means, rows, *outs, stream=stream, aligned=ok)
        return onward

    def mean_of(self, state: Tensor) -> Tensor:
        """A copy of the mean norm that the forward pass used."""
        return state[self.state.spans[2][0]].clone()

    def updated(self, state: Tensor) -> Tensor:
        """A copy of the new buffers: [1] and [2] are the mean norm and its count, [UPDATED:] mean and variance."""
        start, size = updated_span(self.state)
        return state[start : start + size].clone()

    def _empty_squares(self, x: Tensor) -> Tensor | None:
        if not self.block.hands_on:
            return None
        return torch.empty((self.window.batch, *self.window.out), dtype=torch.float32, device=x.device)

    def _make_rows(self, bias: Tensor | None, extras: Extras, places: Places, ok: bool) -> None:
        (*_, updated, rows), (*_, partial) = places
        given = (extras.gamma, extras.beta, bias, extras.prelu)
        tracked = (extras.running_mean, extras.running_var, extras.batches)
        tensors = [rows if tensor is None else tensor for tensor in (*given, *tracked)]
        stream = raw_stream(self.passes.settings.device)
        self.passes.make_rows(partial, *tensors, rows, updated, stream=stream, aligned=ok)

    def _note_updates(self, call: Call, extras: Extras) -> None:
        """Tells autograd which buffers the kernels changed."""
        changed: list[Tensor | None] = []
        if self.passes.settings.update == IN_PLACE:
            changed += [call.running, call.tracked]
        if self.block.update == IN_PLACE:
            changed += [extras.running_mean, extras.running_var, extras.batches]
        torch.autograd.graph.increment_version([tensor for tensor in changed if tensor is not None])

    def _arranged(self, extras: Extras) -> Extras:
        """The extras in the layout that the kernels expect, which they usually have already."""
        residual = extras.residual
        if residual is not None:
            extras = extras._replace(residual=residual.contiguous(memory_format=self.window.format))
        return extras if extras.squares is None else extras._replace(squares=extras.squares.contiguous())

    def block_backward(
        self,
        call: Call,
        extras: Extras,
        gradients: Sequence[Tensor | None],
        saved: Saved,
        needs_input: bool,
        needs_weight: bool,
    ) -> BlockGradients:
        """`gradients` are those of the output, of its squares, and of the output as its second user returned it."""
        call = self.laid_out(call)
        with device_guard(call.x):
            arranged = self._arranged_gradients(gradients, saved.product)
            return self._block_backward(call, extras, arranged, self._laid_out(saved), needs_input, needs_weight)

    def _laid_out(self, saved: Saved) -> Saved:
        """The saved tensors in the layout of the kernels: hooks may have moved them to another."""
        product, unit, state, output = saved
        layout = self.window.format
        output = None if output is None else output.contiguous(memory_format=layout)
        return Saved(product.contiguous(memory_format=layout), unit.contiguous(memory_format=layout), state, output)

    def _arranged_gradients(self, gradients: Sequence[Tensor | None], product: Tensor) -> OutputGradients:
        first, squares, second = gradients
        users = [part.contiguous(memory_format=self.window.format) for part in (first, second) if part is not None]
        if len(users) == 2 and not self.block.has_sums:
            users = [users[0] + users[1]]
        users = users or [torch.zeros_like(product)]
        return OutputGradients(users, None if squares is None else squares.contiguous())

    def _block_backward(
        self,
        call: Call,
        extras: Extras,
        gradients: OutputGradients,
        saved: Saved,
        needs_input: bool,
        needs_weight: bool,
    ) -> BlockGradients:
        x, w, bias, constants, *_ = call
        passes, block, device = self.passes, self.block, x.device
        ok = aligned(*gradients.users, gradients.squares, x, w, bias, *saved, *constants, *extras)
        norm, table, kept, _, rows = self.state.places(saved.state)
        scratch = self.backward_scratch.allocate(device)
        norm_gradient, sums, mean_sums, factor, partial, coefficients = self.backward_scratch.places(scratch)
        found, stream, known = self._new_gradients(bias, extras), raw_stream(device), (norm, table, kept, rows)
        inner = gradients.users[0]
        if block.has_sums:
            inner = self._sum(gradients, saved, known, partial, ok)
            parameters = [rows if made is None else made for made in found]
            passes.row_gradients(partial, rows, *parameters, coefficients, stream=stream, aligned=ok)
        product_gradient = torch.empty_like(inner)
        outs = (coefficients, product_gradient, norm_gradient, sums, mean_sums)
        squares_gradient = inner if gradients.squares is None else gradients.squares
        back = passes.block_back[gradients.squares is not None, inner is not gradients.users[0]]
        back(inner, squares_gradient, saved.product, *known, *outs, stream=stream, aligned=ok)
        size = (self.window.batch, *self.window.size)
        given = torch.empty(size, dtype=torch.float32, device=device) if block.given else None
        into = factor if given is None else given
        spread = None
        if not self.plan.cancels:
            spread = functools.partial(passes.spread, norm, norm_gradient, mean_sums, into, aligned=ok)
        finish = functools.partial(self.finish, w, None, constants, (table, kept, sums), ok)

        def add(gradient: Tensor) -> None:
            if given is None and not self.plan.cancels:
                passes.add(gradient, x, factor, stream=stream, aligned=ok)

        tensors, steps = (product_gradient, x, saved.unit), Steps(spread, finish, add)
        input_gradient, (weight, _, rest) = self.convolve_gradients(tensors, steps, needs_input, needs_weight)
        return BlockGradients(input_gradient, given, inner if block.residual else None, weight, rest, *found)

    def _sum(
        self, gradients: OutputGradients, saved: Saved, known: tuple[Place, ...], partial: Place, ok: bool
    ) -> Tensor:
        """Sums over positions into `partial`; returns the gradient of the activation's input if it is stored."""
        first, handed = gradients.users[0], gradients.squares
        two = len(gradients.users) == 2
        inner = torch.empty_like(first) if self.block.residual or two else first
        given = (first, gradients.users[-1], first if handed is None else handed, saved.product, *known)
        outs = (first if saved.output is None else saved.output, inner, partial)
        stream = raw_stream(first.device)
        self.passes.sums[handed is not None, two](*given, *outs, stream=stream, aligned=ok)
        return inner

    def _new_gradients(self, bias: Tensor | None, extras: Extras) -> list[Tensor | None]:
        """Memory for the gradients of gamma, beta, bias and slopes; one slope per channel, summed later if shared."""
        like = [extras.gamma, extras.beta, bias, extras.prelu]
        return [
            None if tensor is None else torch.empty(self.window.filters, dtype=tensor.dtype, device=tensor.device)
            for tensor in like
        ]


def state_memory(plan: Plan, window: Window, block: BlockSettings) -> Memory:
    """The layout of the state: norms, channel table, mean norms, new running statistics if returned, and rows."""
    patches, filters = window.batch * window.outs, window.filters
    returned = 2 * filters * (block.update == RETURNED)
    return Memory(patches, (len(plan.starts) + 3) * filters, 3, returned, ROWS * filters)


def updated_span(state: Memory) -> tuple[int, int]:
    """Start and size of the part of the state that holds the mean norms and the new running statistics."""
    (start, _), (end, size) = state.spans[2:4]
    return start, end - start + size


class BlockGradients(NamedTuple):
    """The gradients of a block; None for what it does not have."""

    x: Tensor
    squares: Tensor | None
    residual: Tensor | None
    w: Tensor
    constants: list[Tensor]
    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    prelu: Tensor | None


_compiled: dict[Any, FusedBlock] = {}


def fused_block(call: Call, extras: Extras, block: BlockSettings, in_place: bool) -> FusedBlock:
    """The compiled block for such tensors; it updates the mean norm `in_place`, or returns the new one."""
    x, w = call.x, call.w
    tensors = (x, w, call.bias, call.running, call.tracked, *call.constants, *extras)
    numbers = (call.eps, tuple(call.stride), tuple(call.padding), tuple(call.dilation), call.mean)
    key = (call.plan, kinds_of(*tensors), x.shape, x.stride(), w.shape, w.stride(), numbers, block, in_place)
    if key not in _compiled:
        while len(_compiled) >= MOST_COMPILED:
            _compiled.pop(next(iter(_compiled)))
        _compiled[key] = _compile(call, block, in_place)
    return _compiled[key]


def _compile(call: Call, block: BlockSettings, in_place: bool) -> FusedBlock:
    update = NO_UPDATE if call.running is None or call.mean != BATCH_MEAN else IN_PLACE if in_place else RETURNED
    tensors = (call.x.device, call.x.dtype, dense(call.w).stride(), False)
    settings = Settings(*tensors, call.eps, call.mean, update, counted=call.tracked is not None)
    return FusedBlock(call.plan, call.window, settings, block)
