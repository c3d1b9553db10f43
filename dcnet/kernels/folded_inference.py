"""Inference with folded layers and blocks: norms, convolution, and one in-place pass over the output."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from dcnet.kernels.block_passes import BlockPasses, BlockSettings
from dcnet.kernels.launch import Memory, aligned, device_guard, kinds_of, raw_stream, side_stream
from dcnet.kernels.passes import NO_MEAN, NO_UPDATE, Passes, Settings
from dcnet.kernels.plan import Plan, Window, plan_of
from dcnet.operator import Operator
from dcnet.parameters import Value


def folded_table(op: Operator, constants: Mapping[str, Value], factor: Tensor, w_norm: Tensor) -> Tensor:
    """The channel table: a row for each constant and for a and b of a h(b n) g, a column for each filter."""
    like = w_norm.float()
    given = [start if name is None else constants[name] for name, start in _names_and_starts(str(op))]
    rows = (*given, factor, op.weighting.argument(like, torch.ones_like(like)))
    return torch.stack([_row(value, like) for value in rows])


def _row(value: Value, like: Tensor) -> Tensor:
    return value.to(like).expand_as(like) if isinstance(value, Tensor) else torch.full_like(like, value)


def _names_and_starts(spec: str) -> tuple[tuple[str | None, float], ...]:
    plan = plan_of(spec)
    return tuple(zip(plan.names, plan.starts, strict=True))


# A compiler must not trace the parser of specs; see `modern` in dispatch.py for the attribute.
_names_and_starts._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _folded_plan(plan: Plan) -> Plan:
    """The plan of an operator whose constants, including the mean norm, are all in a table."""
    rows = len(plan.relative)
    # A relative radius, fixed or not, is in the table times the mean norm.
    known = tuple(None if relative else value for relative, value in zip(plan.relative, plan.known, strict=True))
    return dataclasses.replace(
        plan, weighted=True, decay=None, relative=(False,) * rows, known=known, learned=(), summed=()
    )


@functools.lru_cache(maxsize=1024)
def _passes(plan: Plan, window: Window, settings: Settings, kinds: Any) -> Passes:
    """The passes of a folded layer, cached by all arguments; `kinds` are those of its tensors."""
    return Passes(_folded_plan(plan), window, settings)


def folded_conv2d(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    table: Tensor,
    operator: str,
    eps: float,
    *window: Any,
) -> Tensor:
    """a h(b n) g(<filter, x> / n) + bias, without a gradient."""
    shape = Window.of(x, filters, *window)
    settings = Settings(x.device, x.dtype, filters.stride(), bias is not None, eps, mean=NO_MEAN, update=NO_UPDATE)
    passes = _passes(plan_of(operator), shape, settings, kinds_of(filters, bias, table))
    x = x.contiguous(memory_format=shape.format)
    memory = Memory(passes.places, passes.patches, passes.norm_sums)
    with device_guard(x):
        squares, norm, sums = memory.places(memory.allocate(x.device))
        ok, stream = aligned(x, bias, table), raw_stream(x.device)
        passes.squares(x, squares, stream=stream, aligned=ok)
        passes.norms(squares, norm, sums, stream=stream, aligned=True)
        product = shape.convolve(x, filters)
        given = (table if bias is None else bias, sums, table, table)
        passes.apply(product, norm, table, *given, product, table, stream=stream, aligned=ok)
    return product


class FoldedBlock(NamedTuple):
    """The arguments of a folded block: activation(layer(x) + residual), with the layer folded.

    `weighted` says whether a and b of the table differ from 1. `rows` are those of a block with the bias as offset, see
    `block_passes.ROWS`; None without a bias and without PReLU.
    """

    x: Tensor
    squares: Tensor | None
    filters: Tensor
    table: Tensor
    rows: Tensor | None
    residual: Tensor | None
    weighted: bool
    operator: str
    eps: float
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    activation: int
    hands_on: bool

    @property
    def window(self) -> Window:
        return Window.of(self.x, self.filters, self.stride, self.padding, self.dilation, 1)

    def passes(self) -> BlockPasses:
        settings = Settings(self.x.device, self.x.dtype, self.filters.stride(), False, self.eps, NO_MEAN, NO_UPDATE)
        block = BlockSettings(
            bias=self.rows is not None,
            activation=self.activation,
            residual=self.residual is not None,
            hands_on=self.hands_on,
        )
        kinds = kinds_of(self.squares, self.filters, self.table, self.rows, self.residual)
        return _block_passes(plan_of(self.operator), self.weighted, self.window, settings, block, kinds)


@functools.lru_cache(maxsize=1024)
def _block_passes(
    plan: Plan, weighted: bool, window: Window, settings: Settings, block: BlockSettings, kinds: Any
) -> BlockPasses:
    """The passes of a folded block, cached by all arguments; `kinds` are those of its tensors."""
    return BlockPasses(dataclasses.replace(_folded_plan(plan), weighted=weighted), window, settings, block)


def folded_rows(bias: Tensor | None, prelu: Tensor | None, filters: int) -> Tensor | None:
    """The rows of a folded block; None if it needs none."""
    source = bias if prelu is None else prelu
    if source is None:
        return None
    like = torch.ones(filters, dtype=torch.float32, device=source.device)
    zeros = torch.zeros_like(like)
    offset = zeros if bias is None else bias.float()
    slope = zeros if prelu is None else prelu.float().expand_as(like)
    return torch.stack([like, offset, slope, zeros, like, offset])


def folded_block(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output of a folded block, and its sums of squares over channels, or an empty tensor if not needed."""
    given = FoldedBlock(*arguments)
    window, passes = given.window, given.passes()
    x, residual = given.x.contiguous(memory_format=window.format), given.residual
    residual = residual if residual is None else residual.contiguous(memory_format=window.format)
    memory = Memory(passes.places * (given.squares is None), passes.patches, passes.norm_sums)
    with device_guard(x):
        squares, norm, sums = memory.places(memory.allocate(x.device))
        ok, stream = aligned(x, given.squares, given.table, given.rows, residual), raw_stream(x.device)
        if given.squares is None:
            passes.squares(x, squares, stream=stream, aligned=ok)
        with side_stream(x.device) as side:
            source = squares if given.squares is None else given.squares
            passes.norms(source, norm, sums, stream=raw_stream(x.device), aligned=ok)
        product = window.convolve(x, given.filters)
        side.join()
        onward = _empty_squares(given, window)
        table, rows = given.table, given.table if given.rows is None else given.rows
        outs = (product if residual is None else residual, product, onward if given.hands_on else table)
        passes.output(product, norm, table, sums, table, table, table, rows, *outs, stream=stream, aligned=ok)
    return product, onward


def _empty_squares(given: FoldedBlock, window: Window) -> Tensor:
    size = (window.batch, *window.out) if given.hands_on else 0
    return given.x.new_empty(size, dtype=torch.float32)


def _block_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = FoldedBlock(*arguments)
    return given.window.empty_output(given.x), _empty_squares(given, given.window)


_LIBRARY = Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    "folded_block(Tensor x, Tensor? squares, Tensor filters, Tensor table, Tensor? rows, Tensor? residual, "
    "bool weighted, str operator, float eps, SymInt[] stride, SymInt[] padding, SymInt[] dilation, int activation, "
    "bool hands_on) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "folded_conv2d(Tensor x, Tensor filters, Tensor? bias, Tensor table, str operator, float eps, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _shape(
    x: Tensor, filters: Tensor, bias: Tensor | None, table: Tensor, operator: str, eps: float, *window: Any
) -> Tensor:
    return Window.of(x, filters, *window).empty_output(x)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("folded_conv2d", folded_conv2d, _key)
    _LIBRARY.impl("folded_block", folded_block, _key)
torch.library.register_fake("dcnet::folded_conv2d", _shape, lib=_LIBRARY)
torch.library.register_fake("dcnet::folded_block", _block_shapes, lib=_LIBRARY)
