"""The filters of a convolution as images."""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from dcnet.escapes import literal

NETWORK = "network."
# More than that nobody looks at.
MOST_FILTERS, MOST_CHANNELS = 256, 16
# Between filters, where neither black nor white nor grey would be told from a filter.
LINE = (0.72, 0.82, 0.95)
TILE_INCHES = 0.8


def convolution(model: nn.Module, name: str | None = None) -> tuple[str, Tensor]:
    """The name and the filters [out, in, height, width] of a layer of a run's network, or of its first convolution."""
    found = {
        layer.removeprefix(NETWORK): module.weight.detach().float()
        for layer, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    if not found:
        raise ValueError("the network has no convolution whose filters could be drawn")
    wanted = next(iter(found)) if name is None else name.removeprefix(NETWORK)
    if wanted not in found:
        raise ValueError(f"--layer {name!r} is no convolution of the network, whose are {', '.join(found)}")
    return wanted, found[wanted]


def filter_images(filters: Tensor, title: str) -> Figure:
    """Draws filters of one channel in grey, of three in colour, and of more a row each with its channels in grey."""
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
    note = f"{about}\neach scaled to its largest weight, middle grey is 0"
    return _figure(_mosaic(tiles, rows, columns), (rows, columns), f"{title}\n{note}")


def _scaled(filters: Tensor) -> Tensor:
    """From [-largest, largest] of each filter to [0, 1], so that signs can be seen."""
    largest = filters.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, 1, 1, 1)
    return filters / (2 * largest) + 0.5


def _near_square(count: int) -> int:
    """Rows of a grid that is somewhat wider than high, without gaps where the count allows it."""
    most = max(1, math.floor(math.sqrt(count)))
    even = [rows for rows in range(most, 0, -1) if count % rows == 0 and count / rows <= 3 * rows]
    return even[0] if even else most


def _mosaic(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The tiles [N, 1 or 3, h, w] side by side with lines around them, as an image [height, width, 3]."""
    count, _, height, width = tiles.shape
    # Repeated, so that a line is thinner than a pixel of a filter.
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
    # The title is wider than few filters are.
    figure = Figure(figsize=(max(inches, 5.5), inches * height / width + 0.75), layout="constrained")
    axes = figure.subplots()
    axes.imshow(image.numpy(), interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(literal(title), fontsize=10)
    return figure


def _part(shown: int, whole: int) -> str:
    return str(whole) if shown == whole else f"the first {shown} of {whole}"
