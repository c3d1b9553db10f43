"""The operators as pictures, which are Figures 2 and 3 of the paper, training curves, and benchmarks."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import magnitude
from dcnet.files import write_atomically
from dcnet.report import feature_docs
from dcnet.report.head_plots import head_costs
from dcnet.report.operator_plots import label, magnitude_values, operator_curves
from dcnet.report.options import Parser
from dcnet.report.speed import speed
from dcnet.report.words import Record

__all__ = ["FORMATS", "benchmark", "geometry", "main", "operator_curves", "save", "speed"]

FORMATS = (".png", ".svg")
DPI = 130
ORIGINAL, PROJECTED, FILTER = "#7ccf7c", "#c81e1e", "tab:blue"


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


def benchmark(record: Record) -> Figure:
    """Draws the record of a benchmark, as fits what it measures."""
    return head_costs(record) if record["benchmark"] == "heads" else speed(record)


def save(figure: Figure, path: Path | str) -> None:
    """Writes the figure as PNG or SVG, by the suffix of the path, at once and whole; creates the folder."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"a figure is written as {' or '.join(FORMATS)}, not as {suffix!r} of {str(path)!r}")
    content = io.BytesIO()
    # Without a date and with fixed names inside, the same figure gives the same SVG.
    with matplotlib.rc_context({"svg.hashsalt": "dcnet"}):
        figure.savefig(content, format=suffix[1:], dpi=DPI, metadata={"Date": None} if suffix == ".svg" else None)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes operators.png and geometry.png, and pictures of features from the records in results/features."""
    parser = Parser(prog="python -m dcnet.report.plots", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go; it is created if it is not there")
    folder = parser.parse_args(arguments).folder
    figures = {"operators.png": operator_curves(), "geometry.png": geometry()}
    for name, figure in (figures | feature_docs.pictures(Path("results"))).items():
        try:
            save(figure, folder / name)
        except OSError as error:
            parser.error(f"cannot write to the folder {str(folder)!r}: {error.strerror}")
        print(folder / name)


if __name__ == "__main__":
    main()
