"""Operators as curves: how large the answer is by the norm of the patch, and by its angle."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.operator import Operator, is_plain
from dcnet.part import Part

DASHES = ("--", ":", (0, (6, 1.5, 1, 1.5)), (0, (3, 2)))

# What is drawn over an axis, by its label.
Lines = dict[str, Tensor]


def operator_curves(specs: Sequence[str] = ()) -> Figure:
    """Draws h(n) at rho = 1 and g(theta) of these operators, or of every registered part (Figure 3)."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    norms, angles = torch.linspace(0, 3, 301), torch.linspace(0, math.pi, 301)
    heights, activations = _of_specs(specs, norms, angles) if specs else _of_registries(norms, angles)
    setting = "‖w‖ = 1, mean ‖x‖ = 1" if specs else r"$\rho = 1$"
    draw_curves(left, norms, heights, (f"Magnitude functions ({setting})", "norm of the patch, ‖x‖", "h(‖x‖)"))
    draw_curves(right, angles, activations, ("Angular activations", "angle between filter and patch, θ", "g(θ)"))
    right.set_xticks([i * math.pi / 4 for i in range(5)], ["0", "π/4", "π/2", "3π/4", "π"])
    return figure


def _of_registries(norms: Tensor, angles: Tensor) -> tuple[Lines, Lines]:
    heights = {label(made()): magnitude_values(made(), norms) for made in magnitude.registry.values()}
    activations = {label(made()): _angle_values(made(), angles.cos()) for made in angle.registry.values()}
    return heights, activations


def _of_specs(specs: Sequence[str], norms: Tensor, angles: Tensor) -> tuple[Lines, Lines]:
    """The curves of the operators, of which several may share one."""
    heights, activations = Lines(), Lines()
    for spec in specs:
        op = Operator("linear", "cos") if is_plain(spec) else Operator.parse(spec)
        weighted = f"+{op.weighting.name}" if op.weighted else ""
        name = f"{spec}, plain" if is_plain(spec) else op.magnitude.spec() + weighted
        heights[name] = _weighted_values(op, norms)
        activations[op.angle.spec()] = op.g(angles.cos(), _start(op))
    return heights, activations


def _weighted_values(op: Operator, norms: Tensor) -> Tensor:
    """h of these norms for a filter of norm 1."""
    constants = _start(op)
    return op.weighting.factor(torch.ones(1), lambda n: op.h(n, constants), op.alpha(constants)) * op.h(
        norms, constants
    )


def magnitude_values(part: magnitude.Magnitude, norms: Tensor) -> Tensor:
    """h of these norms, with the constants that a new layer starts with."""
    op = Operator(part)
    return op.h(norms, _start(op))


def _angle_values(part: angle.Angle, cosines: Tensor) -> Tensor:
    op = Operator("sphere", part)
    return op.g(cosines, _start(op))


def _start(op: Operator) -> dict[str, float | Tensor]:
    """The constants of a new layer of one channel; a relative radius stays relative to a mean norm of 1."""
    return op.constants({name: slot.initial(1) for name, slot in op.learned.items()})


def label(part: Part) -> str:
    """The name, and those constants that are not 1."""
    slots = part.slots()
    shown = [f"{symbol} = {slots[own].init:g}" for own, symbol in part.symbols().items() if slots[own].init != 1]
    return f"{part.name} ({', '.join(shown)})" if shown else part.name


def draw_curves(axes: Axes, x: Tensor, curves: Mapping[str, Tensor], words: tuple[str, str, str]) -> None:
    """Draws ever thinner curves, first light, then dark and dashed, so that each of those that coincide is seen."""
    pairs_of_dark_and_light = matplotlib.colormaps["tab20"]
    for i, (name, y) in enumerate(curves.items()):
        later = i - math.ceil(len(curves) / 2)
        color = pairs_of_dark_and_light(2 * (i % 10) + (later < 0))
        style = "-" if later < 0 else DASHES[later % len(DASHES)]
        width = 5.5 - 3.7 * i / max(len(curves) - 1, 1)
        axes.plot(x.tolist(), y.tolist(), label=name, color=color, linewidth=width, linestyle=style)
    finish(axes, words)


def finish(axes: Axes, words: tuple[str, str, str]) -> None:
    """Title, labels, grid and legend."""
    title, x_label, y_label = words
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(color="0.9")
    axes.margins(x=0.02)
    axes.legend(frameon=False, handlelength=3.5)
