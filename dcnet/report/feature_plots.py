"""Features as they lie, with the directions of their classes (Figures 1 and 6), as a picture and over epochs."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from dcnet.escapes import literal
from dcnet.report.features import Features

# Of the norms, so that a few images far out do not make all others small.
REACH = 0.99
MOST_NAMES = 20
# Letters of a title that a panel has room for.
LINE = 44


def feature_plots(panels: Sequence[Features]) -> Figure:
    """One panel for each network, in which each class has its colour."""
    figure, grid = feature_grid(panels)
    for axes, panel in zip(grid, panels, strict=True):
        draw_features(axes, panel, reach_of([panel]))
    return figure


def feature_grid(panels: Sequence[Features]) -> tuple[Figure, list[Any]]:
    """A figure with empty axes for these networks, and the colours of the classes below."""
    classes = panels[0].classes
    if other := next((panel for panel in panels if panel.classes != classes), None):
        raise ValueError(f"{panels[0].title} and {other.title} have other classes: draw them one by one")
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.0 * columns, 5.9 * rows + 0.4), layout="constrained")
    grid = [
        figure.add_subplot(rows, columns, i + 1, projection="3d" if _solid(panel) else None)
        for i, panel in enumerate(panels)
    ]
    names = [grid[0].scatter([], [], s=30, color=_color(i, len(classes))) for i in range(len(classes))]
    shown = min(len(classes), MOST_NAMES)
    narrow: dict[str, Any] = {"columnspacing": 1.0, "handletextpad": 0.2, "frameon": False}
    ncols = min(shown, 5 * columns)
    figure.legend(names[:shown], list(map(literal, classes[:shown])), loc="outside lower center", ncols=ncols, **narrow)
    return figure, grid


def reach_of(panels: Sequence[Features]) -> float:
    """How far the axes have to reach for nearly all of the features."""
    if _solid(panels[0]):
        return 1.0
    return max(float(panel.points.double().norm(dim=1).quantile(REACH)) for panel in panels) or 1.0


def draw_features(axes: Any, panel: Features, reach: float) -> None:
    """Fills axes that are cleared first; three dimensions are drawn on the sphere, where the angles are."""
    axes.clear()
    solid, count = _solid(panel), len(panel.classes)
    points = F.normalize(panel.points.double(), dim=1) if solid else panel.points.double()
    if solid:
        _draw_sphere(axes)
    for c in panel.labels.unique().tolist():
        axes.scatter(*points[panel.labels == c].T.tolist(), s=5, color=_color(c, count), linewidths=0)
        if panel.directions is not None:
            unit = F.normalize(panel.directions[c].double(), dim=0)
            _draw_direction(axes, unit * reach, str(panel.classes[c]), _color(c, count))
    accuracy = "" if panel.accuracy is None else f": {panel.accuracy:.2f} %"
    axes.set_title(literal(textwrap.fill(f"{panel.title}{accuracy}", LINE)), fontsize=12)
    # Below, since features may lie in any corner.
    above = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.02 if solid else -0.1)}
    axes.legend([], [], title=str(panel.spread), frameon=False, title_fontsize=9, **above)
    _finish(axes, reach, solid)


def _finish(axes: Any, reach: float, solid: bool) -> None:
    limits = (-1.25 * reach, 1.25 * reach)
    axes.set(xlabel="first feature", ylabel="second feature", xlim=limits, ylim=limits)
    if solid:
        axes.set(zlabel="third feature", zlim=limits, xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(-1, 0, 1))
        axes.set_box_aspect((1, 1, 1), zoom=0.88)
    else:
        axes.set_aspect("equal")
        axes.set_axisbelow(True)
        axes.grid(color="0.92")


def _draw_direction(axes: Any, end: Tensor, name: str, color: Any) -> None:
    """A line from the middle, with the name of the class at its end."""
    axes.plot(*zip([0.0] * len(end), end.tolist(), strict=True), color="black", linewidth=0.8, alpha=0.6)
    axes.text(
        *(1.1 * end).tolist(), literal(name), color=color, ha="center", va="center", fontweight="bold", clip_on=True
    )


def _draw_sphere(axes: Any) -> None:
    turn = torch.linspace(0, 2 * math.pi, 40)
    height = torch.linspace(0, math.pi, 20)
    x, y = turn.cos()[:, None] * height.sin(), turn.sin()[:, None] * height.sin()
    z = height.cos().expand_as(x)
    axes.plot_wireframe(x.numpy(), y.numpy(), z.numpy(), color="0.8", linewidth=0.3, rstride=4, cstride=4)


def _solid(panel: Features) -> bool:
    return panel.points.shape[1] == 3


def _color(c: int, count: int) -> Any:
    colors: Any = matplotlib.colormaps["tab10" if count <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    return colors[c % len(colors)]
