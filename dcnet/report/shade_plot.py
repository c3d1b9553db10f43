"""The picture of `make demo`: digits under uneven light, and the error of each network by the light that is left."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.data import Dataset, load_dataset
from dcnet.robustness.corruptions import SEVERITIES, corrupt, registry

# Rows of example images, one per severity, and their number.
EXAMPLES = 5
# Errors of one network: by severity, one per seed; severity 0 is even light.
Errors = Mapping[int, Sequence[float]]


def shade_plot(networks: Mapping[str, Errors]) -> Figure:
    """Draws test images in shades, and errors in % of networks by name, with the range over their seeds."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.7))[0]
    _draw_examples(left)
    _draw_errors(right.subplots(), networks)
    return figure


def shade_names() -> list[str]:
    """Returns the light in the darkest corner, in even light and at each severity."""
    return ["100 %", *(f"{100 * level:.0f} %" for level in registry["shade"].levels)]


def _draw_examples(figure: Figure) -> None:
    data = load_dataset("digits")
    assert isinstance(data, Dataset)
    images = data.test.images[:EXAMPLES].float() / 255
    rows = [images, *(corrupt(images, "shade", severity) for severity in SEVERITIES)]
    grid = figure.subplots(len(rows), EXAMPLES)
    figure.suptitle("Test images, and the light in their darkest corner", fontsize="medium")
    for line, row, name in zip(grid, rows, shade_names(), strict=True):
        for axes, image in zip(line, row, strict=True):
            axes.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")


def _draw_errors(axes: Axes, networks: Mapping[str, Errors]) -> None:
    for place, (name, errors) in enumerate(networks.items()):
        known = sorted(errors)
        means = [statistics.fmean(errors[severity]) for severity in known]
        axes.plot(known, means, ".-", color=f"C{place}", label=name)
        low, high = ([limit(errors[severity]) for severity in known] for limit in (min, max))
        axes.fill_between(known, low, high, color=f"C{place}", alpha=0.15, linewidth=0)
    axes.set_xticks(range(len(SEVERITIES) + 1), shade_names())
    axes.set(xlabel="light in the darkest corner", ylabel="test error, %", ylim=(0, None))
    axes.set_title("Trained in even light, tested under uneven light", fontsize="medium")
    axes.grid(color="0.92")
    axes.legend(frameon=False, loc="upper left")
