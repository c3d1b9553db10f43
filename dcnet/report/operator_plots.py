"""Plots of operators (magnitudes, angles, geometry; Figures 2 and 3) and of margins."""

import math
from collections.abc import Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.component import Component
from dcnet.losses import ASoftmax, Margin, as_margin, registry
from dcnet.operator import Operator, is_plain
from dcnet.report.chart import Axis, Line, LineChart
from dcnet.report.drawing import draw_lines, legend_below

DASHES = ("--", ":", (0, (6, 1.5, 1, 1.5)), (0, (3, 2)))

QUARTERS = tuple((i * math.pi / 4, name) for i, name in enumerate(("0", "π/4", "π/2", "3π/4", "π")))
NORMS = Axis("norm of the patch, ‖x‖", 0, 3)
HEIGHTS = Axis("h(‖x‖)", 0, 4)
ANGLES = Axis("angle between filter and patch, θ", 0, math.pi, ticks=QUARTERS)
RESPONSES = Axis("g(θ)", -1, 1)

# By label.
Curves = dict[str, Tensor]


def operator_curves(specs: Sequence[str] = ()) -> Figure:
    """Draws h(n) at rho = 1 and g(theta) of these operators, or of all registered ones (Figure 3)."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    norms, angles = torch.linspace(0, NORMS.high, 301), torch.linspace(0, ANGLES.high, 301)
    heights, activations = _of_specs(specs, norms, angles) if specs else _of_registries(norms, angles)
    title = f"Magnitude functions ({'‖w‖ = 1, mean ‖x‖ = 1' if specs else 'ρ = 1'})"  # noqa: RUF001 (as in the paper)
    draw_lines(left, LineChart(title, NORMS, HEIGHTS, _operator_lines(norms, heights)))
    draw_lines(right, LineChart("Angular activations", ANGLES, RESPONSES, _operator_lines(angles, activations)))
    for axes in (left, right):
        axes.margins(x=0.02)
        axes.legend(frameon=False, handlelength=3.5)
    return figure


def _of_registries(norms: Tensor, angles: Tensor) -> tuple[Curves, Curves]:
    heights = {label(made()): magnitude_values(made(), norms) for made in magnitude.registry.values()}
    activations = {label(made()): angle_values(made(), angles.cos()) for made in angle.registry.values()}
    return heights, activations


def _of_specs(specs: Sequence[str], norms: Tensor, angles: Tensor) -> tuple[Curves, Curves]:
    """Returns the curves of the operators, without duplicates if they share a magnitude or an angle."""
    heights, activations = Curves(), Curves()
    for spec in specs:
        op = Operator("linear", "cos") if is_plain(spec) else Operator.parse(spec)
        weighted = f"+{op.weighting.name}" if op.weighted else ""
        name = f"{spec}, plain" if is_plain(spec) else op.magnitude.spec() + weighted
        heights[name] = _weighted_values(op, norms)
        activations[op.angle.spec()] = op.g(angles.cos(), _start(op))
    return heights, activations


def _weighted_values(op: Operator, norms: Tensor) -> Tensor:
    """Returns h at these norms, for a filter of norm 1."""
    constants = _start(op)
    return op.factor(torch.ones(1), constants) * op.h(norms, constants)


def magnitude_values(part: magnitude.Magnitude, norms: Tensor) -> Tensor:
    """Returns h at these norms, with the initial constants of a layer."""
    op = Operator(part)
    return op.h(norms, _start(op))


def angle_values(part: angle.Angle, cosines: Tensor) -> Tensor:
    """Returns g at these cosines, with the initial constants of a layer."""
    op = Operator("sphere", part)
    return op.g(cosines, _start(op))


def _start(op: Operator) -> dict[str, float | Tensor]:
    """Returns the initial constants of a layer with one channel; relative radii are for a mean norm of 1."""
    return op.constants({name: slot.initial(1) for name, slot in op.learned.items()})


def label(part: Component) -> str:
    """Returns the name, with all constants that are not 1."""
    slots = part.slots()
    shown = [f"{symbol} = {slots[own].init:g}" for own, symbol in part.symbols().items() if slots[own].init != 1]
    return f"{part.name} ({', '.join(shown)})" if shown else part.name


def _operator_lines(x: Tensor, curves: Curves) -> list[Line]:
    """Returns lines that stay visible if they coincide: each is thinner than the last, and later ones are dashed."""
    pairs_of_dark_and_light = matplotlib.colormaps["tab20"]
    lines = []
    for i, (name, y) in enumerate(curves.items()):
        later = i - math.ceil(len(curves) / 2)
        style = {
            "color": pairs_of_dark_and_light(2 * (i % 10) + (later < 0)),
            "linewidth": 5.5 - 3.7 * i / max(len(curves) - 1, 1),
            "linestyle": "-" if later < 0 else DASHES[later % len(DASHES)],
        }
        lines.append(Line(name, x.tolist(), y.tolist(), style=style))
    return lines


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
    legend_below(figure, 4, grid[:1])
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
MARGIN_ANGLES = Axis("angle between feature and the weights of its class, θ", 0, math.pi, ticks=QUARTERS)


def margin_curves(specs: Sequence[str] = (), m: float = 4.0) -> Figure:
    """Draws psi of these margins (default: all), psi of A-softmax with this m during annealing, and slopes of psi."""
    margins, angular = [as_margin(spec) for spec in specs or registry], ASoftmax(m=m)
    theta = torch.linspace(0, math.pi, 721, dtype=torch.float64)
    cos = theta.cos()
    targets = {_label(margin): margin.target(cos) for margin in margins}
    annealed = {f"λ = {easing}": (easing * cos + angular.target(cos)) / (1 + easing) for easing in EASINGS}
    slopes = {_label(margin): _pull(margin, theta) for margin in margins}
    panels = (
        ("Logit of the label, divided by s", "ψ(θ)", targets),
        (f"{angular.name}, m = {m:g}, during annealing", "(λ cos θ + ψ(θ)) / (1 + λ)", annealed),
        ("Size of the gradient", "-dψ/dθ", slopes),
    )
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    grid = figure.subplots(1, 3)
    for axes, (title, unit, curves) in zip(grid, panels, strict=True):
        draw_lines(axes, LineChart(title, MARGIN_ANGLES, Axis(unit), _margin_lines(theta, curves)))
    grid[1].legend()
    legend_below(figure, 5, grid[:1])
    return figure


def _pull(margin: Margin, theta: Tensor) -> Tensor:
    """Returns the negative slope of psi, computed by autograd."""
    theta = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(margin.target(theta.cos()).sum(), theta)
    return -slope


def _label(margin: Margin) -> str:
    """Returns the spec, followed by the value of m if the spec does not contain it."""
    spec, given = str(margin), getattr(margin, "m", None)
    return spec if given is None or spec != margin.name else f"{spec}, m = {given:g}"


def _margin_lines(theta: Tensor, curves: Curves) -> list[Line]:
    lines = []
    for i, (name, y) in enumerate(curves.items()):
        # Some margins coincide; the curve below is visible between dashes.
        dashes = MARGIN_DASHES[i // 5 % len(MARGIN_DASHES)]
        style = {"color": f"C{i % 10}", "linestyle": dashes, "linewidth": 2}
        lines.append(Line(name, theta.tolist(), y.tolist(), style=style))
    return lines
