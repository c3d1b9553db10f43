"""The radii that the layers of a network have learned, beside where they started."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from dcnet.escapes import literal
from dcnet.layers import Decoupled
from dcnet.operator import Operator
from dcnet.part import Slot
from dcnet.report.filters import NETWORK


@dataclass(frozen=True)
class Radii:
    """The learned rho of one layer, one for each channel or one for all, and the rho it started from."""

    layer: str
    values: list[float]
    start: float
    relative: bool


def learned_radii(model: nn.Module) -> list[Radii]:
    """The radii of all decoupled layers, in the order of their depth; a ValueError where none is learned."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Decoupled)}
    found = [
        Radii(_shown(name, constant, layer.operator), _values(layer.constants()[constant]), slot.init, slot.relative)
        for name, layer in layers.items()
        for constant, slot in _radius_slots(layer.operator).items()
        if slot.learned
    ]
    if not found:
        raise ValueError(_why_none(list(layers.values())))
    return found


def _radius_slots(operator: Operator) -> dict[str, Slot]:
    """A sum of magnitudes has radius_0, radius_1, ..."""
    return {name: slot for name, slot in operator.slots.items() if name.partition("_")[0] == "radius"}


def _shown(layer: str, constant: str, operator: Operator) -> str:
    name = layer.removeprefix(NETWORK)
    return name if len(_radius_slots(operator)) == 1 else f"{name}, {constant}"


def _values(constant: float | Tensor) -> list[float]:
    return torch.as_tensor(constant).detach().flatten().tolist()


def _why_none(layers: Sequence[Decoupled]) -> str:
    if not layers:
        return "the network is a plain one, which has no radius: give a run of an operator such as tanh-cos"
    fixed = [slot.init for layer in layers for slot in _radius_slots(layer.operator).values()]
    operator = str(layers[0].operator)
    if fixed:
        return f"the radius of {operator!r} is fixed at {fixed[0]:g}, so that there is nothing learned to draw"
    return f"the operator {operator!r} has no radius: give a run of one that has, such as tanh-cos"


def radius_boxes(found: Sequence[Radii], title: str) -> Figure:
    """Draws a box with the quartiles of each layer over a point for each channel, from the first layer down."""
    longest = max(len(radii.layer) for radii in found)
    figure = Figure(figsize=(7.0 + 0.07 * longest, 1.8 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    places = range(len(found))
    for place, radii in zip(places, found, strict=True):
        _draw_points(axes, place, radii.values)
        axes.plot([radii.start] * 2, [place - 0.45, place + 0.45], color="tab:red", linewidth=1.6, zorder=4)
    boxed = [(place, radii.values) for place, radii in zip(places, found, strict=True) if len(radii.values) > 3]
    _draw_boxes(axes, boxed)
    axes.set(title=literal(title), xlabel=rf"radius $\rho$, {_unit(found)}", ylim=(len(found) - 0.4, -0.6))
    axes.set_yticks(places, [literal(radii.layer) for radii in found])
    axes.grid(axis="x", color="0.92")
    handles = [axes.lines[0], axes.lines[1]]
    figure.legend(
        handles, ["a channel", "where all started"], loc="outside lower center", ncols=2, frameon=False, markerscale=1.5
    )
    return figure


def _unit(found: Sequence[Radii]) -> str:
    relative = {radii.relative for radii in found}
    units = {True: "multiples of the mean patch norm", False: "norm of a patch"}
    return " or ".join(unit for kind, unit in units.items() if kind in relative)


def _draw_points(axes: Axes, place: int, values: Sequence[float]) -> None:
    """Beside each other, in the order of the channels, so that equal ones are seen."""
    heights = [place + 0.6 * ((i + 0.5) / len(values) - 0.5) for i in range(len(values))]
    few = len(values) == 1
    axes.plot(values, heights, ".", color="tab:blue", alpha=0.45, markersize=10 if few else 4, zorder=5 if few else 2)


def _draw_boxes(axes: Axes, boxed: Sequence[tuple[int, list[float]]]) -> None:
    if not boxed:
        return
    positions, values = zip(*boxed, strict=True)
    line = {"color": "0.15", "linewidth": 1.1}
    axes.boxplot(
        list(values),
        positions=list(positions),
        orientation="horizontal",
        widths=0.5,
        showfliers=False,
        manage_ticks=False,
        boxprops=line,
        whiskerprops=line,
        capprops=line,
        medianprops={"color": "0.15", "linewidth": 2},
        zorder=3,
    )
