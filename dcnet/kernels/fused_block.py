"""Fused blocks: the passes of decoupled convolution, batch normalization, residual and activation, and their order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels.block_kernels import (
    block_back_kernel,
    block_kernel,
    rows_gradient_kernel,
    rows_kernel,
    statistics_kernel,
    sums_kernel,
)
from dcnet.kernels.convolution import MOST_COMPILED, Call, Convolution, dense
from dcnet.kernels.launch import (
    Launch,
    Memory,
    Place,
    SideStream,
    aligned,
    capturing,
    device_guard,
    power_of_two,
    raw_stream,
)
from dcnet.kernels.passes import BATCH_MEAN, IN_PLACE, NO_UPDATE, RETURNED, Passes, Settings, Tiling
from dcnet.kernels.plan import Plan, Window, plan_of
from dcnet.kernels.window_kernels import prepare_kernel

# The fastest values on an H200; see README.md.
STATISTICS = Tiling(2048, 4, 2, 3, chunks=True)
OUTPUT = Tiling(2048, 6, 4, 3, chunks=True)
SUMS = Tiling(2048, 4, 2, 3, chunks=True)
BLOCK_BACK = Tiling(2048, 4, 2, 3, chunks=True)
# Channels per program of the kernels between the passes.
ROW_WIDTH = 8
# Rows of a block: scale, offset, slope, mean, 1 / deviation and shift.
ROWS = 6

# The new running statistics in `FusedBlock.updated`.
UPDATED = 32

# Codes that kernels compare with these numbers.
NO_NORM, BATCH_NORM, RUNNING_NORM = 0, 1, 2
NO_ACTIVATION, RELU, PRELU = 0, 1, 2


@dataclass(frozen=True)
class BlockSettings:
    """What follows the convolution of a block.

    Attributes:
        norm: NO_NORM, BATCH_NORM (statistics of the batch) or RUNNING_NORM (running statistics).
        eps: epsilon of the normalization.
        momentum: weight of the newest batch in the running statistics; None for their cumulative average.
        update: how the running statistics are updated: NO_UPDATE, RETURNED or IN_PLACE.
        affine: whether the normalization has a weight and a bias.
        bias: whether the convolution has a bias.
        activation: NO_ACTIVATION, RELU or PRELU.
        shared: whether one slope of PReLU serves all channels.
        residual: whether a residual is added before the activation.
        given: whether the sums of squares of the input are given.
        hands_on: whether the sums of squares of the output are returned.
    """

    norm: int = NO_NORM
    eps: float = 0.0
    momentum: float | None = 0.1
    update: int = NO_UPDATE
    affine: bool = False
    bias: bool = False
    activation: int = NO_ACTIVATION
    shared: bool = False
    residual: bool = False
    given: bool = False
    hands_on: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether anything per channel follows the convolution: a normalization, a bias or slopes."""
        return self.norm != NO_NORM or self.bias or self.activation == PRELU

    @property
    def has_sums(self) -> bool:
        """Whether the backward pass needs sums over positions, or dv, before the gradient of the convolution."""
        return self.norm == BATCH_NORM or self.affine or self.bias or self.activation == PRELU or self.residual

    @property
    def needs_output(self) -> bool:
        """Whether the backward pass needs the output: with a residual, v cannot be computed from z alone."""
        return self.residual and (self.activation != NO_ACTIVATION or self.hands_on)

    @property
    def slopes(self) -> int:
        """0 without PReLU, 1 for a shared slope, 2 for one per channel."""
        return 0 if self.activation != PRELU else 1 if self.shared else 2


class BlockPasses(Passes):
    """The launches of a fused block."""

    def __init__(self, plan: Plan, window: Window, settings: Settings, block: BlockSettings):
        self.block = block
        self.norm_scale = 0.5 if block.given else 1.0
        super().__init__(plan, window, settings)
        self.filters = self._filters()
        self.statistic_programs = self._programs(STATISTICS, self.outputs)
        self.sum_programs = self._programs(SUMS, self.outputs)
        self.back_programs = self._programs(BLOCK_BACK, self.outputs)
        self.mean_sums = self.back_programs
        self.positions = window.batch * window.outs
        self.spread = self._spread()
        self.finish = {weight: self._finish(weight) for weight in (True, False)}
        self.statistics, self.make_rows, self.output = self._statistics(), self._make_rows(), self._output()
        self.row_gradients = self._row_gradients()
        both = (True, False)
        self.sums = {(handed, two): self._sums(handed, two) for handed in both for two in both}
        self.block_back = {(handed, direct): self._block_back(handed, direct) for handed in both for direct in both}

    @property
    def sum_rows(self) -> int:
        return 3 if self.block.activation == PRELU else 2

    def _filters(self) -> Launch:
        """Normalizes the filters; the sums of squares of the input are known."""
        numbers = (*self.inputs, 0, *self._filter_numbers, self.settings.eps)
        sizes = {"ONE": True, "BLOCK": 16, "WIDTH": 16, "FAST": self.settings.fast}
        return Launch(prepare_kernel, (self.window.filters, 1), numbers, 4, **self._filter_flags, **sizes)

    def _block_pass(self, kernel: Any, tiling: Tiling, numbers: Sequence[float], **flags: Any) -> Launch:
        """A pass over the output."""
        functions = {**self._operator_flags, "ANGLE": self.plan.angle}
        return self._pass(kernel, tiling, self.outputs, numbers, **functions, **flags)

    @property
    def _mean_flags(self) -> dict[str, Any]:
        settings = self.settings
        return {"UPDATE": settings.update, "COUNTED": settings.counted, "SUMS": power_of_two(self.norm_sums)}

    @property
    def _mean_numbers(self) -> tuple[float, ...]:
        return self.norm_sums, self.patches, self.plan.decay or 0.0

    @property
    def _block_flags(self) -> dict[str, Any]:
        block = self.block
        return {"AFFINE": int(block.has_rows), "ACTIVATION": block.activation, "RESIDUAL": block.residual}

    def _statistics(self) -> Launch:
        flags = {"COUNTS_BATCH": self.block.update == IN_PLACE, **self._mean_flags}
        return self._block_pass(statistics_kernel, STATISTICS, (*self._mean_numbers, *self.outputs), **flags)

    @property
    def _row_grid(self) -> tuple[int]:
        return (-(-self.window.filters // ROW_WIDTH),)

    def _make_rows(self) -> Launch:
        block = self.block
        cumulative = block.momentum is None
        numbers = (self.statistic_programs, self.window.filters, self.positions, block.eps, block.momentum or 0.0)
        flags = {"NORM": block.norm, "AFFINE": block.affine, "BIAS": block.bias, "PRELU": block.slopes}
        sizes = {"PROGRAMS": power_of_two(self.statistic_programs), "WIDTH": ROW_WIDTH}
        updates = {"UPDATE": block.update, "CUMULATIVE": cumulative}
        return Launch(rows_kernel, self._row_grid, numbers, 8, **flags, **updates, **sizes)

    def _output(self) -> Launch:
        block, numbers = self.block, (*self._mean_numbers, *self.outputs)
        flags = {**self._mean_flags, **self._block_flags, "HANDS_ON": block.hands_on}
        flags["FIRST"] = block.norm != BATCH_NORM
        return self._block_pass(block_kernel, OUTPUT, numbers, **flags)

    def _sums(self, handed: bool, two: bool) -> Launch:
        return self._block_pass(sums_kernel, SUMS, self.outputs, **self._block_flags, HANDED=handed, TWO=two)

    def _row_gradients(self) -> Launch:
        block, numbers = self.block, (self.sum_programs, self.window.filters, self.positions)
        flags = {"NORM": block.norm, "AFFINE": block.affine, "BIAS": block.bias, "PRELU": block.slopes}
        sizes = {"PROGRAMS": power_of_two(self.sum_programs), "WIDTH": ROW_WIDTH}
        return Launch(rows_gradient_kernel, self._row_grid, numbers, 8, **flags, **sizes)

    def _block_back(self, handed: bool, direct: bool) -> Launch:
        flags = {**self._block_flags, "HANDED": handed, "DIRECT": direct}
        flags |= {"NORM": self.block.norm, "SUMMED": self.plan.summed}
        return self._block_pass(block_back_kernel, BLOCK_BACK, self.outputs, **flags)


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
        squares = 0 if block.given else passes.places
        partial = (2 * passes.statistic_programs + 1) * filters * (block.norm == BATCH_NORM)
        self.forward_scratch = Memory(squares, passes.norm_sums, partial)
        sums = passes.back_programs * passes.rows * filters
        partial = passes.sum_programs * passes.sum_rows * filters * block.has_sums
        self.backward_scratch = Memory(passes.patches, sums, passes.mean_sums, passes.places, partial, 2 * filters)

    def _prepare(self, w: Tensor, constants: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The normalized filters, and a new state with the channel table."""
        w, device = dense(w), w.device
        state, dtype = self.state.allocate(device), self.passes.settings.dtype
        unit = torch.empty(w.shape, dtype=dtype, device=device, memory_format=self.window.format)
        norm, table, *_ = self.state.places(state)
        stored, ok = self.plan.stored(constants), aligned(w, *constants)
        self.passes.filters(unit, norm, w, unit, table, stored, stream=raw_stream(device), aligned=ok)
        return unit, state

    def block_forward(
        self, call: Call, extras: Extras, overwrite: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """The output and its sums of squares; and for the backward pass: inner products, unit filters and state.

        With `overwrite`, the output takes the memory of the inner products.
        """
        call, extras = self._laid_out(call), self._arranged(extras)
        ok = aligned(call.x, call.w, call.bias, call.running, call.tracked, *call.constants, *extras)
        with device_guard(call.x):
            unit, state = self._prepare(call.w, call.constants)
            buffers = (state, self.forward_scratch.allocate(call.x.device))
            product = self._convolve(call, extras, unit, buffers, ok)
            output = product if overwrite else torch.empty_like(product)
            onward = self._finish_output(call, extras, (product, output), buffers, ok)
        self._note_updates(call, extras)
        return output, onward, product, unit, state

    def _convolve(self, call: Call, extras: Extras, unit: Tensor, buffers: tuple[Tensor, Tensor], ok: bool) -> Tensor:
        """The inner products; concurrently, the norms, and the rows of a block that needs no statistics."""
        x, passes = call.x, self.passes
        norm = self.state.places(buffers[0])[0]
        squares, sums, _ = self.forward_scratch.places(buffers[1])
        given = squares if extras.squares is None else extras.squares
        if extras.squares is None:
            passes.squares(x, squares, stream=raw_stream(x.device), aligned=ok)
        with SideStream(x.device) as side:
            passes.norms(given, norm, sums, stream=raw_stream(x.device), aligned=ok)
            if self.block.has_rows and self.block.norm != BATCH_NORM:
                self._make_rows(call.bias, extras, buffers, ok)
        product = self.window.convolve(x, unit)
        side.join()
        return product

    def _finish_output(
        self, call: Call, extras: Extras, tensors: tuple[Tensor, Tensor], buffers: tuple[Tensor, Tensor], ok: bool
    ) -> Tensor | None:
        """Fills the output from the inner products; returns its sums of squares."""
        (product, output), (state, scratch), passes = tensors, buffers, self.passes
        norm, table, kept, _, rows = self.state.places(state)
        _, sums, partial = self.forward_scratch.places(scratch)
        stream = raw_stream(product.device)
        buffered = [table if buffer is None else buffer for buffer in (call.running, call.tracked)]
        means = (sums, *buffered, kept)
        if self.block.norm == BATCH_NORM:
            batches = table if extras.batches is None else extras.batches
            passes.statistics(product, norm, table, *means, batches, partial, stream=stream, aligned=ok)
            self._make_rows(call.bias, extras, buffers, ok)
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

    def _make_rows(self, bias: Tensor | None, extras: Extras, buffers: tuple[Tensor, Tensor], ok: bool) -> None:
        *_, updated, rows = self.state.places(buffers[0])
        *_, partial = self.forward_scratch.places(buffers[1])
        given = (extras.gamma, extras.beta, bias, extras.prelu)
        tracked = (extras.running_mean, extras.running_var, extras.batches)
        tensors = [rows if tensor is None else tensor for tensor in (*given, *tracked)]
        stream = raw_stream(buffers[0].device)
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
        call = self._laid_out(call)
        with device_guard(call.x):
            arranged = self._arranged_gradients(gradients, saved.product)
            saved = saved._replace(unit=saved.unit.contiguous(memory_format=self.window.format))
            return self._block_backward(call, extras, arranged, saved, needs_input, needs_weight)

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
        given = torch.empty((self.window.batch, *self.window.size), dtype=torch.float32, device=device)
        into = given if block.given else factor
        spread = functools.partial(passes.spread, norm, norm_gradient, mean_sums, into, aligned=ok)
        finish = functools.partial(self._finish, w, None, constants, (table, kept, sums), ok)
        input_gradient, weights = self._convolved(
            (product_gradient, x, saved.unit), spread, finish, (needs_input, needs_weight), (factor, ok)
        )
        return BlockGradients(
            input_gradient, given if block.given else None, inner if block.residual else None, *weights, *found
        )

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

    def _convolved(
        self, tensors: tuple[Tensor, Tensor, Tensor], spread: Any, finish: Any, needs: tuple[bool, bool], add: Any
    ) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Gradients of the input; and of filters and constants.

        In a captured graph, those of filters and constants run concurrently with that of the input.
        """
        (product_gradient, x, unit), (needs_input, needs_weight) = tensors, needs
        device, (factor, ok) = x.device, add
        convolved = functools.partial(self._gradients, product_gradient, x, unit)
        if not capturing(device):
            # One call of torch instead of two, since host time is the limit.
            input_gradient, unit_gradient = convolved(needs_input, needs_weight)
            if needs_input:
                spread(stream=raw_stream(device))
            weight, _, rest = finish(unit_gradient if needs_weight else None, raw_stream(device))
        else:
            with SideStream(device) as side:
                if needs_input:
                    spread(stream=raw_stream(device))
                spread_done = side.mark()
                unit_gradient = convolved(False, needs_weight)[1]
                weight, _, rest = finish(unit_gradient if needs_weight else None, raw_stream(device))
            input_gradient = convolved(needs_input, False)[0]
            side.wait(spread_done)
        if needs_input and not self.block.given:
            self.passes.add(input_gradient, x, factor, stream=raw_stream(device), aligned=ok)
        if capturing(device):
            side.join()
        return input_gradient, (weight, rest)

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
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    numbers = (call.eps, tuple(call.stride), tuple(call.padding), tuple(call.dilation), call.mean)
    key = (call.operator, dtypes, x.shape, x.stride(), w.shape, w.stride(), x.device, numbers, block, in_place)
    if key not in _compiled:
        while len(_compiled) >= MOST_COMPILED:
            _compiled.pop(next(iter(_compiled)))
        _compiled[key] = _compile(call, block, in_place)
    return _compiled[key]


def _compile(call: Call, block: BlockSettings, in_place: bool) -> FusedBlock:
    update = NO_UPDATE if call.running is None or call.mean != BATCH_MEAN else IN_PLACE if in_place else RETURNED
    tensors = (call.x.device, call.x.dtype, dense(call.w).stride(), False)
    settings = Settings(*tensors, call.eps, call.mean, update, counted=call.tracked is not None)
    return FusedBlock(plan_of(call.operator), call.window, settings, block)
