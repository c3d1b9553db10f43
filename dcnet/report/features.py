"""Features of two or three dimensions as they lie, with the directions of their classes (Figures 1 and 6)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

SHOWN = 2000


@dataclass(frozen=True)
class Features:
    """The features [N, 2 or 3] of images with labels [N], and the directions of the classes, where a head has them."""

    title: str
    points: Tensor
    labels: Tensor
    directions: Tensor | None = None

    def __post_init__(self) -> None:
        if self.points.dim() != 2 or self.points.shape[1] not in (2, 3):
            count = self.points.shape[-1]
            raise ValueError(
                f"{self.title} has {count} features, of which 2 or 3 can be drawn: train with --features 2"
            )


@dataclass(frozen=True)
class Spread:
    """Mean angles in degrees, within classes to their mean direction and between these, and the angular Fisher score.

    The score is the sum of 1 - cos to the own class's mean over that of classes to the mean of all: smaller is better.
    """

    within: float
    between: float
    fisher: float

    def __str__(self) -> str:
        return f"within {self.within:.1f}°, between {self.between:.1f}°, angular Fisher score {self.fisher:.3f}"


def spread_of(points: Tensor, labels: Tensor) -> Spread:
    """How narrow the classes are, and how far apart."""
    unit = F.normalize(points.double(), dim=1)
    classes = labels.unique()
    means = torch.stack([F.normalize(unit[labels == c].mean(0), dim=0) for c in classes])
    own = means[torch.searchsorted(classes, labels)]
    cos = (unit * own).sum(1).clamp(-1, 1)
    pairs = (means @ means.T).clamp(-1, 1)[~torch.eye(len(classes), dtype=torch.bool)]
    counts = torch.stack([(labels == c).sum() for c in classes]).double()
    middle = F.normalize(unit.mean(0), dim=0)
    apart = (counts * (1 - means @ middle)).sum()
    return Spread(
        within=torch.rad2deg(torch.acos(cos)).mean().item(),
        between=torch.rad2deg(torch.acos(pairs)).mean().item() if len(classes) > 1 else math.nan,
        fisher=((1 - cos).sum() / apart.clamp(min=1e-12)).item(),
    )


def feature_plots(panels: Sequence[Features], classes: Sequence[str]) -> Figure:
    """One panel for each network, in which each class has its colour."""
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 5.2 * rows + 0.8), layout="constrained")
    for i, panel in enumerate(panels):
        solid = panel.points.shape[1] == 3
        axes: Any = figure.add_subplot(rows, columns, i + 1, projection="3d" if solid else None)
        _draw(axes, panel, classes, solid)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 10), frameon=False, markerscale=3)
    return figure


def _draw(axes: Any, panel: Features, classes: Sequence[str], solid: bool) -> None:
    """Three dimensions are drawn on the sphere, where the angles are."""
    points = (F.normalize(panel.points.double(), dim=1) if solid else panel.points)[:SHOWN]
    colors = matplotlib.colormaps["tab10" if len(classes) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    reach = points.norm(dim=1).quantile(0.98).item() if len(points) else 1.0
    for c in panel.labels.unique().tolist():
        own = points[panel.labels[:SHOWN] == c]
        color = colors[c % len(colors)]
        axes.scatter(*own.T.tolist(), s=4, color=color, label=str(classes[c]), linewidths=0)
        if panel.directions is not None:
            end = F.normalize(panel.directions[c].double(), dim=0) * (1.05 if solid else reach)
            axes.plot(*zip([0.0] * len(end), end.tolist(), strict=True), color=color, linewidth=1.2)
    axes.set_title(f"{panel.title}\n{spread_of(panel.points, panel.labels)}", fontsize=10)
    axes.set(xlabel="first feature", ylabel="second feature")
    axes.set_aspect("equal")
    if solid:
        axes.set_zlabel("third feature")
    else:
        axes.set_axisbelow(True)
        axes.grid(color="0.9")
