"""Rows of norm 1, x / sqrt(sum x^2 + eps) over the last dimension, in one launch, and their gradient in another."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.device_helpers import root
from dcnet.kernels.launch import Launch, aligned, device_guard, kinds_of, power_of_two, raw_stream
from dcnet.norms import accumulation_dtype

# A program holds whole rows: at least this many elements, and at most one row of the largest width.
ELEMENTS, MOST_FEATURES = 2048, 8192
# Wider rows take more warps, so that their elements fit into registers.
WIDE = 4096


def unit_rows(given: Sequence[Tensor], eps: float, dtype: torch.dtype, in_order: bool = False) -> list[Tensor]:
    """x / sqrt(sum x^2 + eps) of each row of one or two tensors [..., features], in one launch.

    The rows of a result lie in memory in the order of its input, or contiguous with `in_order`.

    Args:
        given: tensors with the same number of features, dtype and device.
        dtype: that of the results.
    """
    learning = [x.requires_grad for x in given] if torch.is_grad_enabled() else [False]
    if True not in learning:
        return _normalized(given, eps, dtype, in_order)[0]
    if False in learning:
        return [unit_rows((x,), eps, dtype, in_order)[0] for x in given]
    return list(_apply(eps, dtype, in_order, *given)[:-1])


class UnitRows(torch.autograd.Function):
    """The unit rows of one or two tensors, and 1 / ||x|| of all rows in float32.

    The backward pass needs these results alone, which know how they depend on the input: so it can be differentiated
    again, although the input is not saved.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, dtype: torch.dtype, in_order: bool, *given: Tensor) -> tuple[Tensor, ...]:
        units, inverse, ctx.rows = _normalized(given, eps, dtype, in_order)
        ctx.set_materialize_grads(False)
        ctx.dtype = given[0].dtype
        ctx.save_for_backward(*units, inverse)
        return *units, inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *units, inverse = ctx.saved_tensors
        *by_units, by_inverse = gradients
        plain = all(each is None or torch._C._has_storage(each) for each in gradients)
        if torch.is_grad_enabled() or by_inverse is not None or not plain:
            given = (units, inverse, by_units, by_inverse)
            return (None, None, None, *_differentiable_gradients(*given, ctx.rows, ctx.dtype))
        return (None, None, None, *_gradients(units, inverse, by_units, ctx.rows, ctx.dtype))


# torch's own `apply` also prepares for functorch, which never gets here; this one takes less time.
_apply: Any = super(torch.autograd.Function, UnitRows).apply


class Rows(NamedTuple):
    """How rows lie in memory: row r starts at element r // inner * outer + r % inner * step.

    Attributes:
        order: the dimensions before the last one, from the outermost to the innermost.
        strides: those of a tensor without gaps whose rows lie in this order.
    """

    order: tuple[int, ...]
    strides: tuple[int, ...]
    total: int
    inner: int
    outer: int
    step: int


@functools.lru_cache(maxsize=1024)
def rows_of(shape: Sequence[int], strides: Sequence[int], order: tuple[int, ...] | None = None) -> Rows | None:
    """The rows of a tensor, by default in the order of its memory; None if two strides do not describe them."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    if order is None:
        order = tuple(sorted(range(len(shape) - 1), key=lambda i: -strides[i]))
    merged, count = [(1, 0), (1, 0)], 1
    for i in order:
        count *= shape[i]
        if shape[i] == 1:
            continue
        size, step = merged[-1]
        if size != 1 and step == shape[i] * strides[i]:
            merged[-1] = (size * shape[i], strides[i])
        else:
            merged.append((shape[i], strides[i]))
    (_, outer), (inner, step) = merged[-2:]
    fits = all(size == 1 for size, _ in merged[:-2])
    return Rows(order, _dense_strides(shape, order), count, max(inner, 1), outer, step) if fits else None


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [1] * len(shape), max(shape[-1], 1)
    for i in reversed(order):
        strides[i], step = step, step * max(shape[i], 1)
    return tuple(strides)


def _with_rows(x: Tensor, order: tuple[int, ...] | None) -> tuple[Tensor, Rows]:
    """The tensor and its rows in an order; a contiguous copy of it if two strides do not describe them."""
    rows = rows_of(x.shape, x.stride(), order)
    if rows is None:
        x = x.contiguous()
        rows = rows_of(x.shape, _dense_strides(x.shape, range(x.dim() - 1)), order)
        assert rows is not None
    return x, rows


def _normalized(
    given: Sequence[Tensor], eps: float, dtype: torch.dtype, in_order: bool
) -> tuple[list[Tensor], Tensor, list[Rows]]:
    """The unit rows of every tensor, 1 / ||x|| of all rows, and how the rows of the results lie in memory."""
    found = [_with_rows(x, tuple(range(x.dim() - 1)) if in_order else None) for x in given]
    units = [torch.empty_strided(x.shape, rows.strides, dtype=dtype, device=x.device) for x, rows in found]
    inverse = torch.empty(sum(rows.total for _, rows in found), dtype=torch.float32, device=given[0].device)
    _run(False, eps, [rows for _, rows in found], [x for x, _ in found], units, inverse)
    return units, inverse, [rows for _, rows in found]


def _gradients(
    units: Sequence[Tensor], inverse: Tensor, gradients: Sequence[Tensor | None], rows: Sequence[Rows], dtype: Any
) -> list[Tensor | None]:
    """The gradients of the inputs, without gaps and with the rows in the order of the results."""
    if True in [gradient is None for gradient in gradients]:
        parts = zip(units, inverse.split([own.total for own in rows]), gradients, rows, strict=True)
        return [None if d is None else _gradients([u], part, [d], [own], dtype)[0] for u, part, d, own in parts]
    laid = [_in_order(gradient, own.order) for gradient, own in zip(gradients, rows, strict=True)]
    units = [_with_strides(unit, own.strides) for unit, own in zip(units, rows, strict=True)]
    found = [torch.empty_strided(unit.shape, unit.stride(), dtype=dtype, device=unit.device) for unit in units]
    _run(True, None, [own for _, own in laid], [each for each, _ in laid], units, inverse, found)
    return list(found)


def _with_strides(unit: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The saved result as it was: hooks of saved tensors may have moved it to another layout."""
    if unit.stride() == strides:
        return unit
    return torch.empty_strided(unit.shape, strides, dtype=unit.dtype, device=unit.device).copy_(unit)


def _in_order(gradient: Any, order: tuple[int, ...]) -> tuple[Tensor, Rows]:
    """The gradient and its rows in the given order; copied if two strides do not describe them."""
    rows = rows_of(gradient.shape, gradient.stride(), order)
    if rows is not None:
        return gradient, rows
    return _with_rows(gradient.permute(*order, -1).contiguous(), tuple(range(len(order))))


def _run(backward: bool, eps: float | None, rows: Sequence[Rows], *tensors: Any) -> None:
    """Launches a kernel for one or two tensors; `tensors` are lists with one for each, or one tensor for both."""
    flat = [each for given in tensors for each in ([given] if isinstance(given, Tensor) else (given[0], given[-1]))]
    launch = _launch(backward, eps, flat[0].shape[-1], *[own[2:] for own in rows], kinds=kinds_of(*flat))
    if launch.grid[0] > 0:
        with device_guard(flat[0]):
            launch(*flat, stream=raw_stream(flat[0].device), aligned=aligned(*flat))


@functools.lru_cache(maxsize=1024)
def _launch(backward: bool, eps: float | None, size: int, *rows: tuple[int, ...], kinds: Any) -> Launch:
    """The launch for one or two lists of rows, cached by all arguments; `kinds` are dtypes and device."""
    width = power_of_two(size)
    block = max(ELEMENTS // width, 1)
    tiles = [-(-count // block) for count, *_ in rows]
    numbers = (tiles[0], *rows[0], *(rows[1] if len(rows) > 1 else (0, 1, 0, 0)))
    # All rows start at a multiple of this many elements, so that several are read at once.
    align = math.gcd(16, *(stride for _, _, *strides in rows for stride in strides))
    sizes = {"SIZE": size, "BLOCK": block, "WIDTH": width, "ALIGN": align}
    kernel, warps = unit_rows_gradient_kernel if backward else unit_rows_kernel, 8 if width >= WIDE else 4
    return Launch(kernel, (sum(tiles),), numbers if eps is None else (*numbers, eps), warps, **sizes)


def _differentiable_gradients(
    units: Sequence[Tensor],
    inverse: Tensor,
    by_units: Sequence[Tensor | None],
    by_inverse: Tensor | None,
    rows: Sequence[Rows],
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients of the inputs by torch, which can be differentiated again."""
    counts, found = [own.total for own in rows], []
    by_norms = [None] * len(counts) if by_inverse is None else by_inverse.split(counts)
    for unit, part, by_unit, by_norm, own in zip(units, inverse.split(counts), by_units, by_norms, rows, strict=True):
        u, n = unit.to(accumulation_dtype(unit.dtype)), _as_column(part, unit, own.order)
        total = torch.zeros_like(u)
        if by_unit is not None:
            total = total + (by_unit - u * (u * by_unit).sum(-1, keepdim=True)) * n
        if by_norm is not None:
            total = total - u * (n.square() * _as_column(by_norm, unit, own.order))
        found.append(total.to(dtype))
    return found


def _as_column(values: Tensor, unit: Tensor, order: Sequence[int]) -> Tensor:
    """Values of the rows in the order of memory, as [..., 1]."""
    places = sorted(range(len(order)), key=lambda i: order[i])
    return values.view([unit.shape[i] for i in order]).permute(places).unsqueeze(-1)


@device_function
def unit_rows_kernel(
    first: Block,
    second: Block,
    first_unit: Block,
    second_unit: Block,
    inverse: Block,
    tiles: Block,
    count: Block,
    inner: Block,
    outer: Block,
    step: Block,
    second_count: Block,
    second_inner: Block,
    second_outer: Block,
    second_step: Block,
    eps: Block,
    SIZE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ALIGN: constexpr,
) -> None:
    """The unit rows of two tensors, and 1 / ||x|| of each row; the first `tiles` programs take the first tensor."""
    program = tl.program_id(0)
    if program < tiles:
        normalize_rows(program, first, first_unit, inverse, count, inner, outer, step, eps, SIZE, BLOCK, WIDTH, ALIGN)
    else:
        normalize_rows(
            program - tiles, second, second_unit, inverse + count, second_count, second_inner, second_outer,
            second_step, eps, SIZE, BLOCK, WIDTH, ALIGN,
        )  # fmt: skip


@device_function
def unit_rows_gradient_kernel(
    first: Block,
    second: Block,
    first_unit: Block,
    second_unit: Block,
    inverse: Block,
    first_gradient: Block,
    second_gradient: Block,
    tiles: Block,
    count: Block,
    inner: Block,
    outer: Block,
    step: Block,
    second_count: Block,
    second_inner: Block,
    second_outer: Block,
    second_step: Block,
    SIZE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ALIGN: constexpr,
) -> None:
    """The gradients of two tensors from those of their unit rows, `first` and `second`."""
    program = tl.program_id(0)
    if program < tiles:
        rows_gradient(
            program, first, first_unit, inverse, first_gradient, count, inner, outer, step, SIZE, BLOCK, WIDTH, ALIGN
        )
    else:
        rows_gradient(
            program - tiles, second, second_unit, inverse + count, second_gradient, second_count, second_inner,
            second_outer, second_step, SIZE, BLOCK, WIDTH, ALIGN,
        )  # fmt: skip


@device_function
def places_of(tile: Block, count: Block, inner: Block, outer: Block, step: Block, SIZE: constexpr, BLOCK: constexpr,
              WIDTH: constexpr, ALIGN: constexpr) -> Block:  # fmt: skip
    """Rows of a tile, offsets of their elements with these strides and without gaps, and a mask of both."""
    row, column = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    start = (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step
    inside = (row < count)[:, None] & (column < SIZE)[None, :]
    dense = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    return row, tl.multiple_of(start, ALIGN)[:, None] + column[None, :], dense, inside


@device_function
def normalize_rows(
    tile: Block,
    given: Block,
    unit: Block,
    inverse: Block,
    count: Block,
    inner: Block,
    outer: Block,
    step: Block,
    eps: Block,
    SIZE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ALIGN: constexpr,
) -> None:
    """x / ||x|| and 1 / ||x|| of a tile of rows."""
    row, own, dense, inside = places_of(tile, count, inner, outer, step, SIZE, BLOCK, WIDTH, ALIGN)
    x = tl.load(given + own, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / root(tl.sum(x * x, axis=1) + eps)
    tl.store(unit + dense, (x * factor[:, None]).to(unit.dtype.element_ty), mask=inside)
    tl.store(inverse + row, factor, mask=row < count)


@device_function
def rows_gradient(
    tile: Block,
    given: Block,
    unit: Block,
    inverse: Block,
    gradient: Block,
    count: Block,
    inner: Block,
    outer: Block,
    step: Block,
    SIZE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    ALIGN: constexpr,
) -> None:
    """dx = (d - u <u, d>) / ||x|| of a tile of rows, where d is the gradient of the unit rows u."""
    row, own, dense, inside = places_of(tile, count, inner, outer, step, SIZE, BLOCK, WIDTH, ALIGN)
    d = tl.load(given + own, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(unit + dense, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(inverse + row, mask=row < count, other=0.0)
    found = (d - u * tl.sum(u * d, axis=1)[:, None]) * factor[:, None]
    tl.store(gradient + dense, found.to(gradient.dtype.element_ty), mask=inside)
