"""The figures of the paper and the picture of `make demo`, drawn from records."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.data import Dataset, load_dataset
from dcnet.experiments import get_experiment
from dcnet.experiments.experiment import ERROR
from dcnet.experiments.status import RecordIndex, cell_records
from dcnet.operator import is_plain
from dcnet.registry import unknown_name
from dcnet.report.curves import figure4_records, run_curves
from dcnet.report.feature_plots import feature_plots
from dcnet.report.features import Features, features_in
from dcnet.report.operator_plots import geometry, operator_curves
from dcnet.report.page import Sources as Records
from dcnet.robustness import corruptions
from dcnet.training import Record

# Where the record of a run has its errors at each severity of the shade.
SHADES = ("evaluations", "corruptions", "by_kind", "shade")
# The number of example images for each severity of the shade.
EXAMPLES = 5
# Errors of one network: by severity, one per seed; severity 0 is even light.
Errors = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Sources:
    """The records of runs, and folders with records of features, which are searched recursively."""

    known: RecordIndex
    folders: tuple[Path, ...] = ()

    def features(self, adversarial: bool = False, plain_only: bool = False) -> list[Features]:
        """Returns the features of networks with softmax, without duplicates; raises ValueError for a damaged record.

        Args:
            adversarial: select networks trained with an adversary, instead of those without.
            plain_only: select plain networks only.
        """
        found: dict[tuple[Any, Any], Features] = {}
        for file, record in Records(self.folders).features.items():
            try:
                config = record["config"]
                fits = config["margin"] == "softmax" and adversarial == (config.get("adversary") is not None)
                if fits and (not plain_only or is_plain(config["operator"])):
                    found[record["name"], record["hash"]] = features_in(record)
            except (LookupError, TypeError, ValueError) as error:
                problem = str(error) if isinstance(error, ValueError) else f"it is damaged: {error!r}"
                raise ValueError(f"the features of the record {file!r} cannot be drawn: {problem}") from None
        return list(found.values())


figures: dict[str, Callable[[Sources], Figure]] = {}


def register(draw: Callable[[Sources], Figure]) -> Callable[[Sources], Figure]:
    """Registers a function that draws a figure under its own name; it raises ValueError if records are missing."""
    figures[draw.__name__] = draw
    return draw


def chosen_figures(names: Sequence[str]) -> list[str]:
    """Checks names of figures; "figures" and "all" select all of them."""
    for name in names:
        if name not in ("all", "figures", *figures):
            raise unknown_name("figure", name, ["figures", *figures])
    return list(figures) if {"all", "figures"} & set(names) else list(dict.fromkeys(names))


@register
def figure1(sources: Sources) -> Figure:
    """Draws the features of a plain network: classes differ in direction, and norms vary within a class."""
    return _drawn(sources.features(plain_only=True), "figure1", "softmax")


@register
def figure2(sources: Sources) -> Figure:
    """Draws the geometry of the magnitudes."""
    return geometry()


@register
def figure3(sources: Sources) -> Figure:
    """Draws the curves of magnitudes and angles."""
    return operator_curves()


@register
def figure4(sources: Sources) -> Figure:
    """Draws the convergence of ResNet-32 on CIFAR-100, plain and decoupled."""
    drawn = convergence_records(sources.known)
    if len(drawn) < 2:
        raise ValueError(
            "figure4 needs at least two records of ResNet-32: run `dcnet reproduce table4 --refresh-batches 20`"
        )
    return run_curves(drawn)


def convergence_records(known: RecordIndex) -> list[Record]:
    """Returns the records that Figure 4 shows, of all seeds."""
    return figure4_records(one for _, records in cell_records(get_experiment("table4"), known) for one in records)


@register
def figure6(sources: Sources) -> Figure:
    """Draws the features of a plain network and of networks with bounded operators."""
    return _drawn(sources.features(), "figure6", "softmax --operators conv sphere-cos ball-cos tanh-cos")


@register
def figure7(sources: Sources) -> Figure:
    """Draws the features after adversarial training."""
    options = "softmax --operators conv sphere-cos ball-cos tanh-cos --adversary fgsm"
    return _drawn(sources.features(adversarial=True), "figure7", options)


@register
def figure_shade(sources: Sources) -> Figure:
    """Draws the errors of `digits_in_shade`, which is no figure of the paper."""
    if not (networks := shade_errors(sources.known)):
        raise ValueError("figure_shade needs records of digits_in_shade: run `dcnet reproduce digits-in-shade`")
    return shade_plot(networks)


def shade_errors(known: RecordIndex) -> dict[str, Errors]:
    """Returns the errors in % in even light and at each severity of the shade, by network, of all seeds."""
    found: dict[str, Errors] = {}
    experiment = get_experiment("digits_in_shade")
    for row in experiment.rows:
        cells = tuple(cell for cell in experiment.cells if cell.row == row)[:1]
        for _, records in cell_records(dataclasses.replace(experiment, cells=cells), known):
            errors = [[record.value(path) for path in (ERROR, SHADES)] for record in records]
            whole = [[even, *(100 * shade for shade in shades)] for even, shades in errors if shades]
            if whole:
                found[row] = dict(enumerate(map(list, zip(*whole, strict=True))))
    return found


def shade_plot(networks: Mapping[str, Errors]) -> Figure:
    """Draws test images in shades, and errors in % of networks by name, with the range over their seeds."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.7))[0]
    _draw_examples(left)
    _draw_errors(right.subplots(), networks)
    return figure


def shade_names() -> list[str]:
    """Returns the light in the darkest corner, in even light and at each severity."""
    return ["100 %", *(f"{100 * level:.0f} %" for level in corruptions.registry["shade"].levels)]


def _draw_examples(figure: Figure) -> None:
    data = load_dataset("digits")
    assert isinstance(data, Dataset)
    images = data.test.images[:EXAMPLES].float() / 255
    rows = [images, *(corruptions.corrupt(images, "shade", severity) for severity in corruptions.SEVERITIES)]
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
    axes.set_xticks(range(len(corruptions.SEVERITIES) + 1), shade_names())
    axes.set(xlabel="light in the darkest corner", ylabel="test error, %", ylim=(0, None))
    axes.set_title("Trained in even light, tested under uneven light", fontsize="medium")
    axes.grid(color="0.92")
    axes.legend(frameon=False, loc="upper left")


def _drawn(panels: Sequence[Features], name: str, options: str) -> Figure:
    if not panels:
        command = f"dcnet train --recipe features --margin {options}"
        raise ValueError(f"{name} needs records of features: run `{command}` and `dcnet plot features --records`")
    return feature_plots(panels)
