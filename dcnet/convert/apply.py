"""Any network made a decoupled one, and the way back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from torch import nn

from dcnet.convert.calibrate import calibrate_
from dcnet.convert.choice import ALREADY, Choice, Patterns, plan
from dcnet.convert.conversion import Conversion
from dcnet.convert.size import calibratable
from dcnet.convert.swap import change_
from dcnet.layers import Decoupled, check_options
from dcnet.operator import PLAIN, Operator, as_operator, is_plain

Model = TypeVar("Model", bound=nn.Module)
Report = Callable[[Conversion], object]


def decouple(
    model: Model,
    operator: Operator | str,
    *,
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
    """The network with f(w, x) = h(||w||, ||x||) * g(theta) in its layers, and the weights that it had.

    Layers are the same objects with the same parameters, in place or in a deep copy. What the operator learns is new:
    an optimizer that exists already must be given it, and wrappers such as DDP come afterwards. Layers that cannot be
    decoupled are left and named in the report, which `dcnet.convert.plan` gives without changing anything; those that
    have the operator already are left as they are, with their own eps and blend.

    Args:
        model: any module, also a single layer.
        operator: an Operator, its spec, or "conv", which makes the chosen layers torch's own.
        include: and the other arguments up to `also` say which layers, as in `dcnet.convert.Choice`.
        start: "as-is" only takes the weights over (Section 4.3). "calibrated" also sets each layer's radius and scale,
            which it learns per channel, so that every channel has the norm that it has in the plain network.
        data: a few batches to calibrate with: inputs, or tuples that start with one.
        blend: the t of (1 - t) * plain + t * decoupled that the layers start with; see `BlendSchedule`.
        eps: added under the square root of both norms.
        inplace: change the model itself.
        report: called with what was changed, as in `report=print`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a network to convert is an nn.Module, not {model!r}")
    if report is not None and not callable(report):
        raise TypeError(f"report is called with what was changed, as print is, and cannot be {report!r}")
    check_options(eps, blend)
    target = _target(operator, start, data)
    choice = Choice(include, exclude, where, linear, first, last, shortcuts, depthwise, also)
    conversion = plan(model, target, choice)
    if not is_plain(target):
        _check_some_change(model, conversion)
    model = model if inplace else copy.deepcopy(model)
    layers = {name: model.get_submodule(name) for name in conversion.changed}
    with _restored_on_error(layers.values()):
        for layer in layers.values():
            change_(layer, target, eps, blend)
        if start == "calibrated" and data is not None:
            conversion = _calibrated(model, layers, data, conversion)
    if report is not None:
        report(conversion)
    return model


def recouple(model: Model, *, inplace: bool = False, report: Report | None = None) -> Model:
    """The network with torch's own layers in place of all decoupled ones, and the weights that it had."""
    return decouple(model, PLAIN, linear=True, inplace=inplace, report=report)


def _target(operator: Operator | str, start: str, data: Iterable[Any] | None) -> Operator | str:
    if start not in ("as-is", "calibrated"):
        raise ValueError(f"start must be 'as-is' or 'calibrated', not {start!r}")
    if start == "calibrated" and data is None:
        raise ValueError("start='calibrated' needs data, a few batches of inputs: data=None is given")
    if start == "as-is" and data is not None:
        raise ValueError("data is there to calibrate with, and start='as-is' uses none: give start='calibrated'")
    if is_plain(operator):
        return operator
    return calibratable(as_operator(operator)) if start == "calibrated" else as_operator(operator)


def _check_some_change(model: nn.Module, conversion: Conversion) -> None:
    reasons = dict.fromkeys(conversion.left.values())
    if conversion.changed or ALREADY in reasons:
        return
    why = "; ".join(reasons) or "it has no convolution and no linear layer"
    raise ValueError(f"no layer of {type(model).__name__} is decoupled: {why}")


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
    """Gives layers back their class and state if they cannot be calibrated, so that one can try again."""
    before = [(layer, type(layer), _shallow_state(layer)) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, kind, state in before:
            layer.__class__ = kind
            layer.__dict__ = state
        raise


def _shallow_state(layer: nn.Module) -> dict[str, Any]:
    return {**vars(layer), "_parameters": copy.copy(layer._parameters), "_buffers": copy.copy(layer._buffers)}
