"""How much of the paper is there, at a glance."""

from dcnet.experiments import Experiment
from dcnet.report.page.cells import Found
from dcnet.report.page.markup import Html, code, join, paragraph, table, tag
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

HEADINGS = ("experiment", "cells there", "furthest behind the paper", "what")


@section("Overview", order=0)
def overview(sources: Sources) -> Html:
    """A row for each experiment, and how to read the rest."""
    rows = [_row(experiment, found) for experiment, found in sources.experiments]
    counts = (
        f"{len(sources.runs)} runs, {len(sources.benchmarks)} benchmarks and {len(sources.features)} sets of features"
    )
    intro = paragraph(
        "A decoupled layer computes a magnitude times an angle, f(w, x) = h(‖w‖, ‖x‖) · g(θ), in place of the inner "
        f"product of a convolution. This page is made of the records of {counts}, by ",
        code("dcnet report"),
        ". Every number that was measured opens: below it is the command that made it.",
    )
    return join([intro, table("overview-table", "What of the paper is there", HEADINGS, rows)])


def _row(experiment: Experiment, found: list[Found]) -> list[str]:
    name, _, what = experiment.title.rpartition(": ")
    link = tag("a", name or experiment.name.replace("_", " "), href=f"#{experiment.name}")
    wanted = [one.status for one in found if one.status.state != "quoted"]
    there = sum(status.state == "done" for status in wanted)
    cells = "not run" if experiment.not_run else f"{there} of {len(wanted)}"
    return [link, cells, _furthest(experiment, found), what]


def _furthest(experiment: Experiment, found: list[Found]) -> str:
    """The cell that is most behind the paper; nothing where none is, or where the paper has no numbers."""
    behind = [(one.status.misses_by(experiment.higher_is_better), one.status.cell) for one in found]
    compared = [(gap, cell) for gap, cell in behind if gap is not None]
    if not compared:
        return "nothing to compare yet"
    gap, cell = max(compared, key=lambda pair: pair[0])
    return "none is behind" if gap == 0 else f"{gap:.2f}: {cell.row}, {cell.column}"
