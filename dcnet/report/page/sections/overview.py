"""How much of the paper is there, at a glance."""

from dcnet.experiments import Experiment
from dcnet.report.experiments import distance, furthest_of
from dcnet.report.page.cells import Found
from dcnet.report.page.markup import Html, code, join, paragraph, table, tag
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

HEADINGS = ("experiment", "cells there", "furthest from the paper", "what")


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
    """The cell that differs most from the paper, either way, and by how much."""
    furthest = furthest_of(one.status for one in found)
    if furthest is None:
        return "nothing to compare yet"
    return f"{distance(experiment, furthest)}: {furthest.cell.row}, {furthest.cell.column}"
