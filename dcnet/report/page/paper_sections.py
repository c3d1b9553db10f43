"""Sections about the paper: an overview of all experiments, their tables, and the list of records."""

from collections import Counter

from dcnet.experiments import CellStatus, Experiment
from dcnet.experiments.experiment import NOT_CONVERGED
from dcnet.experiments.findings import FAR, findings_of
from dcnet.report.experiment_tables import distance, furthest_of
from dcnet.report.page.assembly import section
from dcnet.report.page.markup import Html, code, join, paragraph, table, tag
from dcnet.report.page.page_sources import CellResult, Sources
from dcnet.report.page.provenance import AnyRecord, about, command_of, missing_number, no_records, number
from dcnet.training import Record, recipes


@section("Overview", order=0)
def overview(sources: Sources) -> Html:
    """A row per experiment, and how to read the page."""
    rows = [_overview_row(experiment, cells) for experiment, cells in sources.experiments]
    counts = (
        f"{len(sources.runs)} runs, {len(sources.benchmarks)} benchmarks and {len(sources.features)} sets of features"
    )
    intro = paragraph(
        "A decoupled layer computes a magnitude times an angle, f(w, x) = h(‖w‖, ‖x‖) · g(θ), instead of the inner "
        f"product of a convolution. This page shows the records of {counts}. It is written by ",
        code("dcnet report"),
        ". Open a number to see the command that measured it.",
    )
    headings = ("experiment", "cells done", "largest difference from the paper", "what")
    return join([intro, table("overview-table", "Experiments of the paper", headings, rows)])


def _overview_row(experiment: Experiment, cells: list[CellResult]) -> list[str]:
    name, _, what = experiment.title.rpartition(": ")
    link = tag("a", name or experiment.name.replace("_", " "), href=f"#{experiment.name}")
    measured = [one.status for one in cells if one.status.state != "quoted"]
    done = sum(status.state == "done" for status in measured)
    count = "not run" if experiment.not_run else f"{done} of {len(measured)}"
    furthest = furthest_of(one.status for one in cells)
    if furthest is None:
        return [link, count, "nothing to compare yet", what]
    return [link, count, f"{distance(experiment, furthest)}: {furthest.cell.row}, {furthest.cell.column}", what]


@section("Tables: ours beside the paper's", order=10)
def tables(sources: Sources) -> Html:
    """The experiments in their order."""
    reading = paragraph(
        "Each cell has our number at the last step (never the best on the test set), the number of the paper, and the "
        "difference. With several seeds, our number is the mean and the deviation, followed by each seed if they end "
        f"far apart. {NOT_CONVERGED}: did not converge. Green: as good as the paper, or better by up to {FAR:g}. "
        "Orange: worse. Gray: better by more than that, which suggests another setup than the paper's, and is not "
        "counted as a success."
    )
    return join([reading, *(_experiment(experiment, cells) for experiment, cells in sources.experiments)])


def _experiment(experiment: Experiment, cells: list[CellResult]) -> Html:
    found = {(one.status.cell.row, one.status.cell.column): one for one in cells}
    rows = [
        [row, *(_cell(experiment, found.get((row, column))) for column in experiment.columns)]
        for row in experiment.rows
    ]
    better = "Higher is better." if experiment.higher_is_better else "Lower is better."
    box = table(f"{experiment.name}-table", better, ["", *experiment.columns], rows)
    heading = tag("h3", experiment.title, id=experiment.name)
    findings = [str(finding) for finding in findings_of(experiment, [one.status for one in cells]).values()]
    notes = [paragraph(note) for note in (*experiment.notes, *findings)]
    return join([heading, _missing(experiment, cells), *notes, box])


def _missing(experiment: Experiment, cells: list[CellResult]) -> Html:
    """The number of missing cells, and the command that runs them."""
    if experiment.not_run:
        return paragraph(f"Not run: {experiment.not_run}.")
    states = Counter(one.status.state for one in cells)
    lacking = [f"{states['missing']} missing"] if states["missing"] else []
    lacking += [f"{states['partial']} with fewer seeds"] if states["partial"] else []
    if not lacking:
        return paragraph("All cells are done.")
    command = code(f"dcnet reproduce {experiment.name}")
    return paragraph(f"{len(cells) - states['quoted']} cells, {' and '.join(lacking)}: run ", command, ".")


def _cell(experiment: Experiment, found: CellResult | None) -> Html:
    if found is None:
        return Html("")
    status = found.status
    parts = [_ours(experiment, found)]
    if status.cell.paper is not None:
        paper = status.cell.paper if isinstance(status.cell.paper, str) else f"{status.cell.paper:.2f}"
        parts.append(tag("span", f"paper {paper}", class_="paper"))
    if status.difference is not None:
        parts.append(tag("span", f"{status.difference:+.2f}", class_=_class_of(experiment, status)))
    return join(parts)


def _class_of(experiment: Experiment, status: CellStatus) -> str:
    """Behind the paper, ahead of it, or too far ahead to be comparable."""
    if (status.misses_by(experiment.higher_is_better) or 0.0) > 0:
        return "behind"
    return "apart" if abs(status.difference or 0.0) > FAR else "ahead"


def _ours(experiment: Experiment, found: CellResult) -> Html:
    status = found.status
    if status.cell.config is None:
        return tag("span", "quoted", class_="quoted", title="The paper quotes this number from elsewhere.")
    if not found.records:
        # Training alone does not measure the number of an evaluation.
        evaluated = status.cell.evaluation is not None
        command = f"dcnet reproduce {experiment.name}" if evaluated else recipes.command_of(status.cell.config)
        return missing_number("not run" if experiment.not_run else "missing", command)
    count = len(status.values) + status.diverged
    return number(status.ours + (f" ({count} of {status.seeds} seeds)" if count < status.seeds else ""), found.records)


@section("Records", order=90)
def records(sources: Sources) -> Html:
    """A row per run, benchmark and set of features, with its command."""
    others = sources.benchmarks | sources.features
    if not sources.runs and not others:
        return no_records("any kind", "dcnet train", "dcnet report")
    rows = [*map(_run_row, sources.runs), *([name, "done", "", "", *_made(one)] for name, one in others.items())]
    headings = ("run", "status", "error, %", "steps", "command", "made")
    note = paragraph("The command of a benchmark is built from the config in its record.")
    return join([table("records-table", "Records on this page", headings, rows), note])


def _run_row(record: Record) -> list[str]:
    error = record.results.test_error if record.results else None
    steps = f"{record.steps:,}" if record.steps else ""
    return [record.run_name, record.status, "" if error is None else f"{error:.2f}", steps, *_made(record)]


def _made(record: AnyRecord) -> list[str]:
    return [code(command_of(record)), about(record, named=False)]
