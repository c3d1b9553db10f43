"""Converts the layers of a network to decoupled ones, and back.

A layer stays the same object with the same parameters: only its class changes, as it does when torch's lazy layers are
initialized. So optimizers, tied weights, hooks, device, dtype, memory format and training flag are kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

from torch import nn

from dcnet.convert.attention_modules import convert_scores_
from dcnet.convert.blend import drop_blend_
from dcnet.convert.calibrate import calibratable, calibrate_
from dcnet.convert.selection import (
    ALREADY,
    TWINS,
    Choice,
    Conversion,
    Patterns,
    Target,
    parse_target,
    plain_class,
    plan,
)
from dcnet.layers import Decoupled, check_settings
from dcnet.operator import PLAIN, Operator, as_operator, is_plain
from dcnet.tracing import unmark_

Model = TypeVar("Model", bound=nn.Module)
Report = Callable[[Conversion], object]


def decouple(
    model: Model,
    operator: Operator | str | None = None,
    *,
    attention: Operator | str | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    linear: bool = False,
    first: bool = True,
    last: bool = True,
    shortcuts: bool = True,
    depthwise: bool = True,
    also: Sequence[type[nn.Module]] = (),
    start: Literal["as-is", "calibrated"] = "as-is",
    data: Iterable[Any] | None = None,
    blend: float | None = None,
    eps: float = 1e-4,
    inplace: bool = False,
    report: Report | None = None,
) -> Model:
    """Converts layers to f(w, x) = h(||w||, ||x||) * g(theta), scores of attention to f(k, q), or both; keeps weights.

    Layers are the same objects with the same parameters, in place or in a deep copy. The parameters of the operator are
    new: add them to an existing optimizer, and wrap the model, as with DDP, afterwards. Layers that cannot be decoupled
    stay and are named in the report, which `dcnet.convert.plan` returns without changing anything. Layers that have the
    operator already stay as they are, with their own eps and blend.

    Args:
        model: any module, also a single layer.
        operator: an Operator, its spec, or "conv", which converts the selected layers to torch's own. None leaves all
            layers as they are.
        attention: the same for the scores of attention: `nn.MultiheadAttention`, and modules of timm and others that
            call `scaled_dot_product_attention`. A converted module has a child `scores`, a `DecoupledAttention`.
        include: selects layers and attention, as do the other arguments up to `also`; see `dcnet.convert.Choice`.
        start: "as-is" keeps the weights and nothing else (Section 4.3). "calibrated" also sets the radius and the scale
            of each layer, learned per channel, so that every channel has the same norm as in the plain network.
        data: a few batches for calibration: inputs, or tuples that start with one.
        blend: the initial t of (1 - t) * plain + t * decoupled of layers; see `BlendSchedule`.
        eps: added under the square root of both norms.
        inplace: convert the model itself instead of a copy.
        report: called with the `Conversion`, as in `report=print`.
    """
    _check_model(model, report)
    check_settings(eps, blend)
    target = _target(operator, attention, start, data, blend)
    choice = Choice(include, exclude, where, linear, first, last, shortcuts, depthwise, also)
    conversion = plan(model, target, choice, attention)
    _check_some_change(model, conversion, target, attention)
    model = model if inplace else copy.deepcopy(model)
    changed = {name: model.get_submodule(name) for name in conversion.changed}
    layers = {name: module for name, module in changed.items() if isinstance(module, tuple(TWINS))}
    with _restored_on_error(changed.values()):
        for layer in layers.values():
            change_(layer, cast(Operator | str, target), eps, blend)
        if start == "calibrated" and data is not None:
            conversion = _calibrated(model, layers, data, conversion)
        # After the calibration, in which layers get the inputs of the plain network.
        for name in changed.keys() - layers.keys():
            convert_scores_(changed[name], parse_target(attention), eps)
    if report is not None:
        report(conversion)
    return model


def _check_model(model: Any, report: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r}")
    if report is not None and not callable(report):
        raise TypeError(f"report must be a function of the conversion, such as print, not {report!r}")


def recouple(model: Model, *, inplace: bool = False, report: Report | None = None) -> Model:
    """Converts all decoupled layers and attention of a network back to torch's own, and keeps its weights."""
    return decouple(model, PLAIN, attention=PLAIN, linear=True, inplace=inplace, report=report)


def change_(layer: nn.Module, operator: Operator | str, eps: float, blend: float | None) -> None:
    """Gives a layer the operator in place, or makes it torch's own for "conv"; keeps weight and bias."""
    plain = plain_class(layer)
    if isinstance(layer, Decoupled):
        _drop_state_(layer)
    if is_plain(operator):
        vars(layer).pop("sync", None)  # Set by dcnet.sync_norms.
        unmark_(layer)
        layer.__class__ = plain
        return
    layer.__class__ = TWINS[plain]
    cast(Decoupled, layer).set_operator(as_operator(operator), eps, blend)


def _drop_state_(layer: Decoupled) -> None:
    drop_blend_(layer)
    for name in ("mean_norm", "num_batches_tracked"):
        layer._buffers.pop(name, None)
    for name in layer.operator.learned:
        delattr(layer, name)
    del layer.operator, layer.eps, layer.initial_blend


def _target(operator: Target, attention: Target, start: str, data: Iterable[Any] | None, blend: float | None) -> Target:
    if operator is None and attention is None:
        raise ValueError("decouple needs an operator for layers, such as 'tanh-cos', or attention='sphere-cos'")
    if blend is not None and operator is None:
        raise ValueError(f"blend={blend!r} is for layers and requires an operator, not None")
    if start not in ("as-is", "calibrated"):
        raise ValueError(f"start must be 'as-is' or 'calibrated', not {start!r}")
    if start == "calibrated" and operator is None:
        raise ValueError("start='calibrated' is for layers and requires an operator, not None")
    if start == "calibrated" and data is None:
        raise ValueError("start='calibrated' requires data, a few batches of inputs, not None")
    if start == "as-is" and data is not None:
        raise ValueError("start='as-is' does not use data: give start='calibrated'")
    target = parse_target(operator)
    return calibratable(target) if start == "calibrated" and isinstance(target, Operator) else target


def _check_some_change(model: nn.Module, conversion: Conversion, operator: Target, attention: Target) -> None:
    """Raises ValueError if an operator was given, for layers or for attention, and changes nothing."""
    for scores, given, missing in (
        (False, operator, "it has no convolution and no linear layer"),
        (True, attention, "it has no attention"),
    ):
        rows = [row for row in conversion.rows if row.is_attention == scores]
        reasons = dict.fromkeys(row.note for row in rows)
        changed = any(row.after is not None for row in rows) or ALREADY in reasons
        if given is None or is_plain(given) or changed:
            continue
        kind = "attention" if scores else "layer"
        raise ValueError(f"no {kind} of {type(model).__name__} is decoupled: {'; '.join(reasons) or missing}")


def _calibrated(
    model: nn.Module, layers: dict[str, nn.Module], data: Iterable[Any], conversion: Conversion
) -> Conversion:
    decoupled = {name: layer for name, layer in layers.items() if isinstance(layer, Decoupled)}
    missed = calibrate_(model, decoupled, data) if decoupled else []
    notes = {name: "not reached by the data" if name in missed else "calibrated" for name in decoupled}
    rows = (dataclasses.replace(row, note=notes.get(row.layer, row.note)) for row in conversion.rows)
    return Conversion(tuple(rows))


@contextlib.contextmanager
def _restored_on_error(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Restores class and state of the layers if calibration fails."""
    before = []
    for layer in layers:
        own = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks")
        state = {**vars(layer), **{name: copy.copy(vars(layer)[name]) for name in own}}
        before.append((layer, type(layer), state))
    try:
        yield
    except BaseException:
        for layer, kind, state in before:
            layer.__class__ = kind
            layer.__dict__ = state
        raise
