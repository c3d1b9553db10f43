"""The operators as pictures, which are Figures 2 and 3 of the paper, training curves, and benchmarks."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.files import write_atomically
from dcnet.operator import Operator
from dcnet.part import Part
from dcnet.report.options import Parser
from dcnet.report.speed import speed

__all__ = ["FORMATS", "Curves", "geometry", "main", "operator_curves", "save", "speed", "training_curves"]

FORMATS = (".png", ".svg")
ORIGINAL, PROJECTED, FILTER = "#7ccf7c", "#c81e1e", "tab:blue"
DASHES = ("--", ":", (0, (6, 1.5, 1, 1.5)), (0, (3, 2)))

# What one run leaves behind: the values of each curve, by its name, epoch by epoch.
Curves = Mapping[str, Sequence[float]]


def operator_curves() -> Figure:
    """Draws h(n) of every registered magnitude at rho = 1 and g(theta) of every registered angle (Figure 3)."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    norms, angles = torch.linspace(0, 3, 301), torch.linspace(0, math.pi, 301)
    heights = {_label(made()): _magnitude(made(), norms) for made in magnitude.registry.values()}
    activations = {_label(made()): _angle(made(), angles.cos()) for made in angle.registry.values()}
    _draw_curves(left, norms, heights, (r"Magnitude functions ($\rho = 1$)", "norm of the patch, ‖x‖", "h(‖x‖)"))
    _draw_curves(right, angles, activations, ("Angular activations", "angle between filter and patch, θ", "g(θ)"))
    right.set_xticks([i * math.pi / 4 for i in range(5)], ["0", "π/4", "π/2", "3π/4", "π"])
    return figure


def geometry() -> Figure:
    """Draws, for every registered magnitude, vectors x of the plane and h(||x||) x / ||x|| (Figure 2)."""
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


def training_curves(histories: Mapping[str, Sequence[Curves]]) -> Figure:
    """Draws training loss and test accuracy by epoch: the mean of each operator's runs, in a band from min to max.

    Args:
        histories: for each operator one entry a run, with the curves `train_loss` and `test_accuracy` (in percent).
    """
    if not any(histories.values()):
        raise ValueError(f"training curves need one run at least, but histories are {dict(histories)!r}")
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for operator, runs in histories.items():
        _draw_runs(loss, operator, [run["train_loss"] for run in runs])
        _draw_runs(accuracy, operator, [run["test_accuracy"] for run in runs])
    loss.set_yscale("log")
    _finish(loss, ("Training loss", "epoch", "cross entropy"))
    _finish(accuracy, ("Test accuracy", "epoch", "test accuracy, %"))
    _show_from_below(accuracy, [run["test_accuracy"] for runs in histories.values() for run in runs])
    return figure


def save(figure: Figure, path: Path | str) -> None:
    """Writes the figure as PNG or SVG, by the suffix of the path, at once and whole; creates the folder."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"a figure is written as {' or '.join(FORMATS)}, not as {suffix!r} of {str(path)!r}")
    content = io.BytesIO()
    # Without a date and with fixed names inside, the same figure gives the same SVG.
    with matplotlib.rc_context({"svg.hashsalt": "dcnet"}):
        figure.savefig(content, format=suffix[1:], dpi=130, metadata={"Date": None} if suffix == ".svg" else None)
    write_atomically(path, content.getvalue())


def _magnitude(part: magnitude.Magnitude, norms: Tensor) -> Tensor:
    op = Operator(part)
    return op.h(norms, _start(op))


def _angle(part: angle.Angle, cosines: Tensor) -> Tensor:
    op = Operator("sphere", part)
    return op.g(cosines, _start(op))


def _start(op: Operator) -> dict[str, float | Tensor]:
    """The constants of a new layer of one channel; a relative radius stays relative to a mean norm of 1."""
    return op.constants({name: slot.initial(1) for name, slot in op.learned.items()})


def _label(part: Part) -> str:
    """The name, and those constants that are not 1."""
    slots = part.slots()
    shown = [f"{symbol} = {slots[own].init:g}" for own, symbol in part.symbols().items() if slots[own].init != 1]
    return f"{part.name} ({', '.join(shown)})" if shown else part.name


def _draw_curves(axes: Axes, x: Tensor, curves: Mapping[str, Tensor], words: tuple[str, str, str]) -> None:
    """Draws ever thinner curves, first light, then dark and dashed, so that each of those that coincide is seen."""
    pairs_of_dark_and_light = matplotlib.colormaps["tab20"]
    for i, (label, y) in enumerate(curves.items()):
        later = i - math.ceil(len(curves) / 2)
        color = pairs_of_dark_and_light(2 * (i % 10) + (later < 0))
        style = "-" if later < 0 else DASHES[later % len(DASHES)]
        width = 5.5 - 3.7 * i / max(len(curves) - 1, 1)
        axes.plot(x.tolist(), y.tolist(), label=label, color=color, linewidth=width, linestyle=style)
    _finish(axes, words)


def _finish(axes: Axes, words: tuple[str, str, str]) -> None:
    title, x_label, y_label = words
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(color="0.9")
    axes.margins(x=0.02)
    axes.legend(frameon=False, handlelength=3.5)


def _draw_projection(axes: Axes, part: magnitude.Magnitude) -> None:
    norms = torch.tensor([0.5, 1.7, 0.9, 1.9, 0.6, 1.5, 1.9])
    directions = torch.arange(len(norms)) * (2 * math.pi / len(norms)) + 0.15
    radius = part.slots()["radius"].init if "radius" in part.slots() else 1.0
    _draw_circle(axes, radius, r"radius $\rho$, or 1 where there is none")
    _draw_arrows(axes, norms, directions, ORIGINAL, 0.02, "x")
    _draw_arrows(axes, _magnitude(part, norms), directions, PROJECTED, 0.011, "h(‖x‖) x / ‖x‖")
    _draw_arrows(axes, torch.ones(1), torch.tensor([1.5]), FILTER, 0.016, "w, of norm 1")
    axes.set(title=_label(part), aspect="equal", xlim=(-3, 3), ylim=(-3, 3), xticks=range(-3, 4))
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


def _draw_runs(axes: Axes, operator: str, runs: Sequence[Sequence[float]]) -> None:
    by_epoch = list(zip(*runs, strict=True))
    epochs = range(1, len(by_epoch) + 1)
    means = [sum(values) / len(values) for values in by_epoch]
    (line,) = axes.plot(epochs, means, label=f"{operator}, mean of {len(runs)}" if len(runs) > 1 else operator)
    axes.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], color=line.get_color(), alpha=0.2)


def _show_from_below(axes: Axes, runs: Sequence[Sequence[float]]) -> None:
    """Leaves the first quarter out of the vertical limits, where curves rise from chance and would flatten the rest."""
    late = [value for run in runs for value in run[len(run) // 4 :]]
    low, high = min(late), max(max(run) for run in runs)
    margin = 0.05 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes operators.png and geometry.png."""
    parser = Parser(prog="python -m dcnet.report.plots", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go; it is created if it is not there")
    folder = parser.parse_args(arguments).folder
    for name, figure in {"operators.png": operator_curves(), "geometry.png": geometry()}.items():
        try:
            save(figure, folder / name)
        except OSError as error:
            parser.error(f"cannot write to the folder {str(folder)!r}: {error.strerror}")
        print(folder / name)


if __name__ == "__main__":
    main()
