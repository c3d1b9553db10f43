"""The figures of the paper, drawn from records."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

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
from dcnet.report.shade_plot import shade_plot
from dcnet.training import Record

# Where the record of a run has its errors at each severity of the shade.
SHADES = ("evaluations", "corruptions", "by_kind", "shade")


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


def shade_errors(known: RecordIndex) -> dict[str, dict[int, list[float]]]:
    """Returns the errors in % in even light and at each severity of the shade, by network, of all seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    experiment = get_experiment("digits_in_shade")
    for row in experiment.rows:
        cells = tuple(cell for cell in experiment.cells if cell.row == row)[:1]
        for _, records in cell_records(dataclasses.replace(experiment, cells=cells), known):
            errors = [[record.value(path) for path in (ERROR, SHADES)] for record in records]
            whole = [[even, *(100 * shade for shade in shades)] for even, shades in errors if shades]
            if whole:
                found[row] = dict(enumerate(map(list, zip(*whole, strict=True))))
    return found


def _drawn(panels: Sequence[Features], name: str, options: str) -> Figure:
    if not panels:
        command = f"dcnet train --recipe features --margin {options}"
        raise ValueError(f"{name} needs records of features: run `{command}` and `dcnet plot features --records`")
    return feature_plots(panels)
