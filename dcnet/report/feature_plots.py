"""Plots, animations and tables of two- or three-dimensional features (Figures 1 and 6)."""

import io
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from dcnet.operator import PLAIN, is_plain
from dcnet.report.drawing import literal
from dcnet.report.features import Features, features_in, target_angle
from dcnet.table import Table

# The axes end at this quantile of the norms, so that a few outliers do not shrink the rest.
REACH = 0.99
MOST_NAMES = 20
# The largest number of characters per line of a title.
LINE = 44


def feature_plots(panels: Sequence[Features]) -> Figure:
    """Draws a panel per network, with a color per class."""
    figure, grid = feature_grid(panels)
    for axes, panel in zip(grid, panels, strict=True):
        draw_features(axes, panel, reach_of([panel]))
    return figure


def feature_grid(panels: Sequence[Features]) -> tuple[Figure, list[Any]]:
    """Returns a figure with a legend of the classes, and empty axes for each network."""
    classes = panels[0].classes
    if other := next((panel for panel in panels if panel.classes != classes), None):
        raise ValueError(f"{panels[0].title} and {other.title} have different classes: draw them one by one")
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
    """Returns the limit of the axes, which includes nearly all features."""
    if _solid(panels[0]):
        return 1.0
    return max(float(panel.points.double().norm(dim=1).quantile(REACH)) for panel in panels) or 1.0


def draw_features(axes: Any, panel: Features, reach: float) -> None:
    """Clears the axes and draws the features; three dimensions are projected to the unit sphere."""
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
    # Place the legend below the axes, since features may be in any corner.
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
    """Draws a line from the origin, with the name of the class at its end."""
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


MILLISECONDS, LAST_MILLISECONDS = 250, 2500
MOST_FRAMES, COLORS, DPI = 40, 128, 90
MOST_BYTES = 3_000_000


def feature_animation(runs: Sequence[Sequence[Features]]) -> bytes:
    """Returns a looping GIF with a panel per run, and a frame per evaluation.

    Shorter runs stay at their last evaluation. If there are too many evaluations, some are omitted at even intervals.
    """
    longest = max(len(frames) for frames in runs)
    steps = _some(longest, MOST_FRAMES)
    images = _images(runs, steps)
    content = _gif(images)
    while len(content) > MOST_BYTES and len(images) > 2:
        images = [images[i] for i in _some(len(images), (len(images) + 1) // 2)]
        content = _gif(images)
    return content


def _some(count: int, most: int) -> list[int]:
    """Returns at most `most` indices below `count`, evenly spaced and including the last."""
    if count <= most:
        return list(range(count))
    return sorted({round((i + 1) * count / most) - 1 for i in range(most)})


def _images(runs: Sequence[Sequence[Features]], steps: Sequence[int]) -> list[Image.Image]:
    figure, grid = feature_grid([frames[-1] for frames in runs])
    figure.set_dpi(DPI)
    canvas, reaches = FigureCanvasAgg(figure), [reach_of(frames) for frames in runs]
    images = []
    for i in steps:
        for axes, frames, reach in zip(grid, runs, reaches, strict=True):
            draw_features(axes, frames[min(i, len(frames) - 1)], reach)
        canvas.draw()
        # Keep the layout of the first frame, so that nothing moves.
        figure.set_layout_engine("none")
        images.append(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB"))
    return images


def _gif(images: Sequence[Image.Image]) -> bytes:
    """Encodes the frames, with one palette against flicker, and without dithering, which compresses badly."""
    # A palette by pixel count would be mostly white and gray, so use maximum coverage.
    palette = images[-1].quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    durations = [*[MILLISECONDS] * len(others), LAST_MILLISECONDS]
    content = io.BytesIO()
    first.save(content, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return content.getvalue()


Record = dict[str, Any]
# Losses are compared with plain networks, and networks with this loss.
LOSS = "softmax"
ORDER = (LOSS, "m-softmax", "a-softmax"), (PLAIN, "sphere-cos", "ball-cos", "tanh-cos")
HEADINGS = ["network", "loss", "test accuracy, %", "to own weights, °"]
HEADINGS += ["within, °", "between, °", "nearest, °", "angular Fisher score"]


def features(records: Sequence[Record]) -> str:
    """Returns the table of the docs, with the accuracy of each network and the angles between its features."""
    first = records[0]["config"]
    about = (
        f"`--recipe {first['recipe']}`: {first['dataset'].upper()}, `{first['model']}` of width {first['width']:g}, "
        f"{first['features']} features, {first['steps']:,} steps of {first['batch_size']}, seed {first['seed']}; all "
        f"{records[0]['test_images']:,} test images, at the last step"
    )
    rows = [_row(record) for record in _sorted(records)]
    return Table.of_rows(HEADINGS, rows, names=2, title=about).markdown_section()


def pictures(results: Path) -> dict[str, Figure]:
    """Returns the figures of the docs by file name; empty without records."""
    records = _sorted(
        [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / "features").glob("*.json"))]
    )
    natural = [record for record in records if record["config"].get("adversary") is None]
    chosen = {
        "features_losses.png": [record for record in natural if is_plain(record["config"]["operator"])],
        "features_operators.png": [record for record in natural if record["config"]["margin"] == LOSS],
        "features_adversarial.png": [record for record in records if record not in natural],
    }
    return {name: feature_plots([features_in(record) for record in some]) for name, some in chosen.items() if some}


def _row(record: Record) -> list[str]:
    config, spread = record["config"], record["spread"]
    annealed = f", annealing {config['annealing']}" if config["annealing"] else ""
    angles = [f"{spread[name]:.1f}" for name in ("within", "between", "nearest")]
    adversary = f", against `{config['adversary']}`" if config.get("adversary") else ""
    names = [f"`{config['operator']}`", f"`{config['margin']}`{annealed}{adversary}"]
    return [*names, f"{record['accuracy']:.2f}", _target(record), *angles, f"{spread['fisher']:.4f}"]


def _target(record: Record) -> str:
    found = features_in(record)
    if found.directions is None:
        return "-"
    return f"{target_angle(found.points, found.labels, found.directions):.1f}"


def _sorted(records: Sequence[Record]) -> list[Record]:
    """Sorts plain networks first, by loss, then decoupled ones, then those trained with an adversary."""
    losses, operators = ORDER

    def place(record: Record) -> tuple[bool, int, int, str]:
        config = record["config"]
        return (
            config.get("adversary") is not None,
            _index(operators, config["operator"]),
            _index(losses, config["margin"].partition("(")[0]),
            config["annealing"] or "",
        )

    return sorted(records, key=place)


def _index(known: Sequence[str], name: str) -> int:
    return known.index(name) if name in known else len(known)
