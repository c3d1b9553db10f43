"""Inference of folded layers: the norms, the convolution, and one pass over its output, in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.kernels.launch import aligned
from dcnet.kernels.memory import Memory
from dcnet.kernels.passes import Passes, Settings
from dcnet.kernels.plan import Plan, Window, plan_of
from dcnet.kernels.streams import raw_stream
from dcnet.operator import Operator
from dcnet.part import Value


def folded_table(op: Operator, constants: Mapping[str, Value], factor: Tensor, w_norm: Tensor) -> Tensor:
    """A row for each constant, for a and for b of a h(b n) g, with an entry for every filter."""
    like = w_norm.float()
    given = [start if name is None else constants[name] for name, start in _names_and_starts(str(op))]
    rows = (*given, factor, op.weighting.argument(like, torch.ones_like(like)))
    return torch.stack([_row(value, like) for value in rows])


def _row(value: Value, like: Tensor) -> Tensor:
    return value.to(like).expand_as(like) if isinstance(value, Tensor) else torch.full_like(like, value)


def _names_and_starts(spec: str) -> tuple[tuple[str | None, float], ...]:
    plan = plan_of(spec)
    return tuple(zip(plan.names, plan.starts, strict=True))


# A compiler is not to follow how a spec is read; see `modern` in gate.py for the attribute.
_names_and_starts._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _folded_plan(spec: str) -> Plan:
    """The plan of an operator whose constants are all in a table, its mean norm included."""
    plan = plan_of(spec)
    rows = len(plan.relative)
    return dataclasses.replace(
        plan, weighted=True, decay=None, relative=(False,) * rows, known=(None,) * rows, learned=(), summed=()
    )


@functools.lru_cache(maxsize=1024)
def _passes(spec: str, window: Window, settings: Settings, *kinds: Any) -> Passes:
    """The passes of such a layer; `kinds`, the dtypes of what it is called with, keeps them apart."""
    return Passes(_folded_plan(spec), window, settings)


def folded_conv2d(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    table: Tensor,
    operator: str,
    eps: float,
    window: Sequence[Any],
) -> Tensor:
    """a h(b n) g(<filter, x> / n) + bias, with nothing kept for any gradient."""
    shape = Window.of(x, filters, *window)
    settings = Settings(x.device, x.dtype, filters.stride(), bias is not None, eps, mean=0, update=0)
    passes = _passes(operator, shape, settings, None if bias is None else bias.dtype)
    x = x.contiguous(memory_format=shape.format)
    memory = Memory(passes.places, passes.patches, passes.norm_sums)
    with torch.cuda._DeviceGuard(x.device.index if x.is_cuda else -1):
        squares, norm, sums = memory.places(memory.allocate(x.device))
        ok, stream = aligned(x, bias, table), raw_stream(x.device)
        passes.squares(x, squares, stream=stream, aligned=ok)
        passes.norms(squares, norm, sums, stream=stream, aligned=True)
        sizes = (shape.stride, shape.padding, shape.dilation, False, (0, 0), shape.groups)
        product = torch.ops.aten.convolution.default(x, filters, None, *sizes).contiguous(memory_format=shape.format)
        given = (table if bias is None else bias, sums, table, table)
        passes.apply(product, norm, table, *given, product, table, stream=stream, aligned=ok)
    return product
