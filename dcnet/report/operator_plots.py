"""Plots of operators and margins: magnitudes by norm, angles, geometry (Figures 2 and 3), and logits."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.component import Component
from dcnet.losses import ASoftmax, Margin, as_margin, registry
from dcnet.operator import Operator, is_plain

DASHES = ("--", ":", (0, (6, 1.5, 1, 1.5)), (0, (3, 2)))

# Curves by label.
Lines = dict[str, Tensor]


def operator_curves(specs: Sequence[str] = ()) -> Figure:
    """Draws h(n) at rho = 1 and g(theta) of these operators, or of all registered ones (Figure 3)."""
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
    activations = {label(made()): angle_values(made(), angles.cos()) for made in angle.registry.values()}
    return heights, activations


def _of_specs(specs: Sequence[str], norms: Tensor, angles: Tensor) -> tuple[Lines, Lines]:
    """The curves of the operators; operators may share a magnitude or an angle."""
    heights, activations = Lines(), Lines()
    for spec in specs:
        op = Operator("linear", "cos") if is_plain(spec) else Operator.parse(spec)
        weighted = f"+{op.weighting.name}" if op.weighted else ""
        name = f"{spec}, plain" if is_plain(spec) else op.magnitude.spec() + weighted
        heights[name] = _weighted_values(op, norms)
        activations[op.angle.spec()] = op.g(angles.cos(), _start(op))
    return heights, activations


def _weighted_values(op: Operator, norms: Tensor) -> Tensor:
    """h at these norms for a filter of norm 1."""
    constants = _start(op)
    return op.factor(torch.ones(1), constants) * op.h(norms, constants)


def magnitude_values(part: magnitude.Magnitude, norms: Tensor) -> Tensor:
    """h at these norms, with the constants of a new layer."""
    op = Operator(part)
    return op.h(norms, _start(op))


def angle_values(part: angle.Angle, cosines: Tensor) -> Tensor:
    """g at these cosines, with the constants of a new layer."""
    op = Operator("sphere", part)
    return op.g(cosines, _start(op))


def _start(op: Operator) -> dict[str, float | Tensor]:
    """The constants of a new layer of one channel; a relative radius stays relative to a mean norm of 1."""
    return op.constants({name: slot.initial(1) for name, slot in op.learned.items()})


def label(part: Component) -> str:
    """The name, and all constants that are not 1."""
    slots = part.slots()
    shown = [f"{symbol} = {slots[own].init:g}" for own, symbol in part.symbols().items() if slots[own].init != 1]
    return f"{part.name} ({', '.join(shown)})" if shown else part.name


def draw_curves(axes: Axes, x: Tensor, curves: Mapping[str, Tensor], words: tuple[str, str, str]) -> None:
    """Draws each curve thinner than the one before, later ones dashed, so that all are visible if they coincide."""
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


ORIGINAL, PROJECTED, FILTER = "#7ccf7c", "#c81e1e", "tab:blue"


def geometry() -> Figure:
    """Draws vectors x and h(||x||) x / ||x|| for every registered magnitude (Figure 2)."""
    columns = 4
    rows = math.ceil(len(magnitude.registry) / columns)
    figure = Figure(figsize=(2.8 * columns, 2.9 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, made in zip(grid, magnitude.registry.values(), strict=False):
        _draw_projection(axes, made())
    for axes in grid[len(magnitude.registry) :]:
        axes.set_axis_off()
    figure.suptitle("What a magnitude does to a patch: x becomes h(‖x‖) x / ‖x‖")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _draw_projection(axes: Axes, part: magnitude.Magnitude) -> None:
    norms = torch.tensor([0.5, 1.7, 0.9, 1.9, 0.6, 1.5, 1.9])
    directions = torch.arange(len(norms)) * (2 * math.pi / len(norms)) + 0.15
    radius = part.slots()["radius"].init if "radius" in part.slots() else 1.0
    _draw_circle(axes, radius, r"radius $\rho$, or 1 without a radius")
    _draw_arrows(axes, norms, directions, ORIGINAL, 0.02, "x")
    _draw_arrows(axes, magnitude_values(part, norms), directions, PROJECTED, 0.011, "h(‖x‖) x / ‖x‖")
    _draw_arrows(axes, torch.ones(1), torch.tensor([1.5]), FILTER, 0.016, "w, of norm 1")
    axes.set(title=label(part), aspect="equal", xlim=(-3, 3), ylim=(-3, 3), xticks=range(-3, 4))
    axes.grid(color="0.93")
    axes.tick_params(labelbottom=True)


def _draw_circle(axes: Axes, radius: float, label: str) -> None:
    turn = torch.linspace(0, 2 * math.pi, 181)
    x, y = radius * turn.cos(), radius * turn.sin()
    axes.plot(x.tolist(), y.tolist(), color="0.45", linestyle="--", linewidth=1, label=label)


def _draw_arrows(axes: Axes, norms: Tensor, directions: Tensor, color: str, width: float, label: str) -> None:
    x, y = (norms * directions.cos()).numpy(), (norms * directions.sin()).numpy()
    origin = [0.0] * len(x)
    arrows = axes.quiver(origin, origin, x, y, angles="xy", scale_units="xy", scale=1, color=color, width=width)
    arrows.set(label=label, zorder=2)


MARGIN_DASHES = ("-", "--", ":", "-.")
EASINGS = (1000, 100, 20, 5, 0)


def margin_curves(specs: Sequence[str] = (), m: float = 4.0) -> Figure:
    """Draws psi of these margins (default: all), psi of A-softmax during annealing, and the slopes of psi."""
    margins = [as_margin(spec) for spec in specs or registry]
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    theta = torch.linspace(0, math.pi, 721, dtype=torch.float64)
    for i, margin in enumerate(margins):
        _draw(left, theta, margin.target(theta.cos()), _label(margin), i)
        _draw(right, theta, _pull(margin, theta), _label(margin), i)
    angular = ASoftmax(m=m)
    for i, easing in enumerate(EASINGS):
        cos = theta.cos()
        _draw(middle, theta, (easing * cos + angular.target(cos)) / (1 + easing), f"λ = {easing}", i)
    _finish(left, "The target's logit over s", "ψ(θ)")
    _finish(middle, f"{angular.name}, m = {m:g}, under annealing", "(λ cos θ + ψ(θ)) / (1 + λ)")
    _finish(right, "Size of the gradient", "-dψ/dθ")
    middle.legend()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _pull(margin: Margin, theta: Tensor) -> Tensor:
    """The negative slope by autograd."""
    theta = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(margin.target(theta.cos()).sum(), theta)
    return -slope


def _label(margin: Margin) -> str:
    """The spec, followed by the value of m if the spec does not contain it."""
    spec, given = str(margin), getattr(margin, "m", None)
    return spec if given is None or spec != margin.name else f"{spec}, m = {given:g}"


def _draw(axes: Axes, theta: Tensor, values: Tensor, label: str, i: int) -> None:
    # Some margins coincide: dashes show the curve below.
    style = MARGIN_DASHES[i // 5 % len(MARGIN_DASHES)]
    axes.plot(theta.tolist(), values.detach().tolist(), label=label, color=f"C{i % 10}", linestyle=style, linewidth=2)


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="angle between feature and the weights of its class, θ", ylabel=ylabel)
    axes.set_xticks([i * math.pi / 4 for i in range(5)], ["0", "π/4", "π/2", "3π/4", "π"])
    axes.grid(color="0.9")
