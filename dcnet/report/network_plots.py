"""Plots of trained networks: filters as images, and learned radii."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from dcnet.layers import Decoupled
from dcnet.operator import Operator
from dcnet.parameters import Slot
from dcnet.report.drawing import literal

NETWORK = "network."
MOST_FILTERS, MOST_CHANNELS = 256, 16
# The color of the lines between filters.
LINE = (0.72, 0.82, 0.95)
TILE_INCHES = 0.8


def convolution(model: nn.Module, name: str | None = None) -> tuple[str, Tensor]:
    """Returns the name and the filters [out, in, height, width] of a convolution; of the first one by default."""
    found = {
        layer.removeprefix(NETWORK): module.weight.detach().float()
        for layer, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    if not found:
        raise ValueError("the network has no convolution, so there are no filters to draw: give another run")
    wanted = next(iter(found)) if name is None else name.removeprefix(NETWORK)
    if wanted not in found:
        raise ValueError(f"--layer must be a convolution of the network, not {name!r}: one of {', '.join(found)}")
    return wanted, found[wanted]


def filter_images(filters: Tensor, title: str) -> Figure:
    """Draws filters with one channel in gray, with three channels in color, and others as a row of gray channels."""
    channels = filters.shape[1]
    if channels in (1, 3):
        shown = filters[:MOST_FILTERS]
        rows = _near_square(len(shown))
        tiles, about = _scaled(shown), f"{_part(len(shown), len(filters))} filters"
    else:
        shown = filters[:MOST_CHANNELS, :MOST_CHANNELS]
        rows = len(shown)
        tiles = _scaled(shown).flatten(0, 1)[:, None]
        about = f"{_part(rows, len(filters))} filters, a row each, by {_part(shown.shape[1], channels)} channels"
    columns = math.ceil(len(tiles) / rows)
    note = f"{about}\neach scaled to its largest weight, medium gray is 0"
    return _figure(_mosaic(tiles, rows, columns), (rows, columns), f"{title}\n{note}")


def _scaled(filters: Tensor) -> Tensor:
    """Maps the weights of each filter from [-m, m] to [0, 1], where m is the largest absolute weight."""
    largest = filters.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, 1, 1, 1)
    return filters / (2 * largest) + 0.5


def _near_square(count: int) -> int:
    """Returns the number of rows of a nearly square grid, wider than high, without gaps if possible."""
    most = max(1, math.floor(math.sqrt(count)))
    even = [rows for rows in range(most, 0, -1) if count % rows == 0 and count / rows <= 3 * rows]
    return even[0] if even else most


def _mosaic(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Arranges tiles [N, 1 or 3, h, w] in a grid with lines around them; returns an image [height, width, 3]."""
    count, _, height, width = tiles.shape
    # Repeat pixels, so that lines are thinner than the pixels of a filter.
    zoom = max(1, math.ceil(24 / max(height, width)))
    large = tiles.expand(-1, 3, -1, -1).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    line, color = 2, torch.tensor(LINE)
    page = color.view(3, 1, 1).repeat(columns * rows, 1, height * zoom + line, width * zoom + line)
    page[:count, :, line:, line:] = large
    sides = page.shape[2] * rows, page.shape[3] * columns
    joined = page.view(rows, columns, *page.shape[1:]).permute(0, 3, 1, 4, 2).reshape(*sides, 3)
    framed = color.repeat(sides[0] + line, sides[1] + line, 1)
    framed[: sides[0], : sides[1]] = joined
    return framed


def _figure(image: Tensor, grid: tuple[int, int], title: str) -> Figure:
    height, width = image.shape[:2]
    inches = min(max(TILE_INCHES * grid[1], 3.0), 8.0)
    # The extra height is for the title.
    figure = Figure(figsize=(max(inches, 5.5), inches * height / width + 0.75), layout="constrained")
    axes = figure.subplots()
    axes.imshow(image.numpy(), interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(literal(title), fontsize=10)
    return figure


def _part(shown: int, whole: int) -> str:
    return str(whole) if shown == whole else f"the first {shown} of {whole}"


@dataclass(frozen=True)
class Radii:
    """The learned radii of a layer, per channel or one for all channels, and their initial value `start`."""

    layer: str
    values: list[float]
    start: float
    relative: bool


def learned_radii(model: nn.Module) -> list[Radii]:
    """Returns the learned radii of all decoupled layers in order; raises ValueError if there are none."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Decoupled)}
    found = [
        Radii(_shown(name, constant, layer.operator), _values(layer.constants()[constant]), slot.init, slot.relative)
        for name, layer in layers.items()
        for constant, slot in _radius_slots(layer.operator).items()
        if slot.learned
    ]
    if not found:
        raise ValueError(_why_none(list(layers.values())))
    return found


def _radius_slots(operator: Operator) -> dict[str, Slot]:
    """Returns the radii of an operator; a sum of magnitudes has radius_0, radius_1, ..."""
    return {name: slot for name, slot in operator.slots.items() if name.partition("_")[0] == "radius"}


def _shown(layer: str, constant: str, operator: Operator) -> str:
    name = layer.removeprefix(NETWORK)
    return name if len(_radius_slots(operator)) == 1 else f"{name}, {constant}"


def _values(constant: float | Tensor) -> list[float]:
    return torch.as_tensor(constant).detach().flatten().tolist()


def _why_none(layers: Sequence[Decoupled]) -> str:
    if not layers:
        return "a plain network has no radius: give a run of an operator such as tanh-cos"
    fixed = [slot.init for layer in layers for slot in _radius_slots(layer.operator).values()]
    operator = str(layers[0].operator)
    if fixed:
        return f"the radius of {operator!r} is fixed at {fixed[0]:g}: give a run with a learned radius"
    return f"the operator {operator!r} has no radius: give a run of an operator with a radius, such as tanh-cos"


def radius_boxes(found: Sequence[Radii], title: str) -> Figure:
    """Draws a box plot per layer, with a point per channel; the first layer is at the top."""
    longest = max(len(radii.layer) for radii in found)
    figure = Figure(figsize=(7.0 + 0.07 * longest, 1.8 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, radii in enumerate(found):
        _draw_points(axes, place, radii.values)
        axes.plot([radii.start] * 2, [place - 0.45, place + 0.45], color="tab:red", linewidth=1.6, zorder=4)
        if len(radii.values) > 3:
            _draw_box(axes, place, radii.values)
    axes.set(title=literal(title), xlabel=rf"radius $\rho$, {_unit(found)}", ylim=(len(found) - 0.4, -0.6))
    axes.set_yticks(range(len(found)), [literal(radii.layer) for radii in found])
    axes.grid(axis="x", color="0.92")
    handles = [axes.lines[0], axes.lines[1]]
    figure.legend(
        handles, ["a channel", "initial value"], loc="outside lower center", ncols=2, frameon=False, markerscale=1.5
    )
    return figure


def _unit(found: Sequence[Radii]) -> str:
    relative = {radii.relative for radii in found}
    units = {True: "multiples of the mean patch norm", False: "norm of a patch"}
    return " or ".join(unit for kind, unit in units.items() if kind in relative)


def _draw_points(axes: Axes, place: int, values: Sequence[float]) -> None:
    """Draws the points at different heights, in the order of the channels, so that equal ones are visible."""
    heights = [place + 0.6 * ((i + 0.5) / len(values) - 0.5) for i in range(len(values))]
    few = len(values) == 1
    axes.plot(values, heights, ".", color="tab:blue", alpha=0.45, markersize=10 if few else 4, zorder=5 if few else 2)


def _draw_box(axes: Axes, place: int, values: Sequence[float]) -> None:
    line = {"color": "0.15", "linewidth": 1.1}
    axes.boxplot(
        values,
        positions=[place],
        orientation="horizontal",
        widths=0.5,
        showfliers=False,
        manage_ticks=False,
        boxprops=line,
        whiskerprops=line,
        capprops=line,
        medianprops={"color": "0.15", "linewidth": 2},
        zorder=3,
    )
