"""Features over the epochs of training, as a GIF."""

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from dcnet.report.feature_plots import draw_features, feature_grid, reach_of
from dcnet.report.features import Features

MILLISECONDS, LAST_MILLISECONDS = 250, 2500
MOST_FRAMES, COLORS, DPI = 40, 128, 90
MOST_BYTES = 3_000_000


def feature_animation(runs: Sequence[Sequence[Features]]) -> bytes:
    """A GIF that begins again and again, of one panel for each run, on axes that stay where they are.

    A run with fewer evaluations than others stays at its last. Of too many evaluations some are left out, evenly.
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
    """Indices below a count, at most so many, evenly and with the last."""
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
        # The first frame has found the places, which must not move by a pixel when a number gets longer.
        figure.set_layout_engine("none")
        images.append(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB"))
    return images


def _gif(images: Sequence[Image.Image]) -> bytes:
    """One palette for all, so that colours do not flicker, and without dithering, which would not compress."""
    # By how far colours are from each other: by how many pixels have them, white and grey would take all.
    palette = images[-1].quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    durations = [*[MILLISECONDS] * len(others), LAST_MILLISECONDS]
    content = io.BytesIO()
    first.save(content, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return content.getvalue()
