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

from dcnet import magnitude
from dcnet.files import write_atomically
from dcnet.report.operator_plots import finish, label, magnitude_values, operator_curves
from dcnet.report.options import Parser
from dcnet.report.speed import speed

__all__ = ["FORMATS", "Curves", "geometry", "main", "operator_curves", "save", "speed", "training_curves"]

FORMATS = (".png", ".svg")
ORIGINAL, PROJECTED, FILTER = "#7ccf7c", "#c81e1e", "tab:blue"

# What one run leaves behind: the values of each curve, by its name, epoch by epoch.
Curves = Mapping[str, Sequence[float]]


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
    finish(loss, ("Training loss", "epoch", "cross entropy"))
    finish(accuracy, ("Test accuracy", "epoch", "test accuracy, %"))
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


def _draw_projection(axes: Axes, part: magnitude.Magnitude) -> None:
    norms = torch.tensor([0.5, 1.7, 0.9, 1.9, 0.6, 1.5, 1.9])
    directions = torch.arange(len(norms)) * (2 * math.pi / len(norms)) + 0.15
    radius = part.slots()["radius"].init if "radius" in part.slots() else 1.0
    _draw_circle(axes, radius, r"radius $\rho$, or 1 where there is none")
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
