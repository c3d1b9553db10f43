"""Inference with folded layers: norms, convolution, and one in-place pass over the output."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from dcnet.kernels.launch import Memory, aligned, device_guard, raw_stream
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
def _folded_plan(spec: str) -> Plan:
    """The plan of an operator whose constants, including the mean norm, are all in a table."""
    plan = plan_of(spec)
    rows = len(plan.relative)
    return dataclasses.replace(
        plan, weighted=True, decay=None, relative=(False,) * rows, known=(None,) * rows, learned=(), summed=()
    )


@functools.lru_cache(maxsize=1024)
def _passes(spec: str, window: Window, settings: Settings, *kinds: Any) -> Passes:
    """The passes of a folded layer, cached by all arguments; `kinds` are further dtypes of the call."""
    return Passes(_folded_plan(spec), window, settings)


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
    passes = _passes(operator, shape, settings, None if bias is None else bias.dtype)
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


_LIBRARY = Library("dcnet", "FRAGMENT")
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
torch.library.register_fake("dcnet::folded_conv2d", _shape, lib=_LIBRARY)
