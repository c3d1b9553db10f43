"""Draws charts with matplotlib, and writes figures to files."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.files import write_atomically
from dcnet.report.chart import BarChart, LineChart

FORMATS = (".png", ".svg")
DPI = 130
BARS_WIDTH = 0.84


def save(figure: Figure, path: Path | str) -> None:
    """Writes the figure as PNG or SVG, depending on the suffix of the path; creates the folder."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"the suffix of a figure must be {' or '.join(FORMATS)}, not {suffix!r} as in {str(path)!r}")
    content = io.BytesIO()
    # Without a date and with fixed ids, the SVG is deterministic.
    with matplotlib.rc_context({"svg.hashsalt": "dcnet"}):
        figure.savefig(content, format=suffix[1:], dpi=DPI, metadata={"Date": None} if suffix == ".svg" else None)
    write_atomically(path, content.getvalue())


def literal(text: str) -> str:
    """Escapes dollar signs, which delimit equations in matplotlib."""
    return text.replace("$", r"\$")


def draw_lines(axes: Axes, chart: LineChart) -> None:
    """Draws the lines, the title, and the names and ticks of the axes."""
    for line in chart.lines:
        axes.plot(line.x, line.y, label=literal(line.name), **line.style)
    axes.set(title=literal(chart.title), xlabel=chart.x.name, ylabel=chart.y.name)
    for axis, name in ((chart.x, "x"), (chart.y, "y")):
        if axis.log:
            axes.set(**{f"{name}scale": "log"})
        if axis.ticks:
            places, texts = zip(*axis.ticks, strict=True)
            axes.set(**{f"{name}ticks": places, f"{name}ticklabels": texts})
    axes.grid(color="0.9", which="major")


def draw_bars(axes: Axes, chart: BarChart, groups: Sequence[str], series: Sequence[str]) -> None:
    """Draws a bar per group and series, labeled with its value."""
    width = BARS_WIDTH / len(series)
    values = {(group.name, name): value for group in chart.groups for name, value in group.values.items()}
    for i, name in enumerate(series):
        heights = [values.get((group, name), math.nan) for group in groups]
        places = [place - BARS_WIDTH / 2 + (i + 0.5) * width for place in range(len(groups))]
        drawn = axes.bar(places, heights, 0.92 * width, label=literal(name), color=f"C{i}", zorder=2)
        labels = ["" if math.isnan(height) else f"{height:.2f}" for height in heights]
        axes.bar_label(drawn, labels, fontsize=8, padding=1)
    if chart.base is not None:
        axes.axhline(chart.base, color="0.2", linestyle="--", linewidth=1, zorder=3)
    # With many groups, put the last word of each name on a second line.
    names = ["\n".join(group.rsplit(" ", 1)) if len(groups) > 3 else group for group in groups]
    axes.set_xticks(range(len(groups)), list(map(literal, names)))
    axes.set(title=literal(chart.title), ylabel=chart.unit)
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", color="0.9", zorder=0)


def legend_below(figure: Figure, columns: int, axes: Iterable[Axes] = ()) -> None:
    """Draws one legend below the figure, for these axes or for all; a label that several axes share appears once."""
    handles: dict[str, Any] = {}
    for one in [*axes] or figure.axes:
        handles |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))
    ncols = min(len(handles), columns)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False)
