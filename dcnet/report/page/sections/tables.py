"""Every experiment as a table: ours, the paper's, the difference, and what is missing."""

from collections import Counter

from dcnet.experiments import CellStatus, Experiment
from dcnet.experiments.experiment import NOT_CONVERGED
from dcnet.experiments.findings import told_of
from dcnet.experiments.nearness import FAR
from dcnet.report.page.cells import Found
from dcnet.report.page.markup import Html, code, join, paragraph, table, tag
from dcnet.report.page.origin import number, wanted
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources
from dcnet.training.recipes import command_of


@section("Tables: ours beside the paper's", order=10)
def tables(sources: Sources) -> Html:
    """The experiments in their order."""
    reading = paragraph(
        "In each cell: our number, at the last step and never the best on the test set, with the deviation over seeds "
        "where there are several, and each seed where they end far apart; the paper's; and ours without the paper's. "
        f"{NOT_CONVERGED}: it did not converge. "
        f"Green is as good as the paper or better by up to {FAR:g}, orange is worse, and grey is better by more than "
        "that: such a number was hardly made as the paper's was, and is not taken for a success."
    )
    return join([reading, *(_experiment(experiment, found) for experiment, found in sources.experiments)])


def _experiment(experiment: Experiment, cells: list[Found]) -> Html:
    found = {(one.status.cell.row, one.status.cell.column): one for one in cells}
    rows = [
        [row, *(_cell(experiment, found.get((row, column))) for column in experiment.columns)]
        for row in experiment.rows
    ]
    better = "Higher is better." if experiment.higher_is_better else "Lower is better."
    box = table(f"{experiment.name}-table", better, ["", *experiment.columns], rows)
    heading = tag("h3", experiment.title, id=experiment.name)
    told = [finding.sentence for finding in told_of(experiment, [one.status for one in cells])]
    notes = [paragraph(note) for note in (*experiment.notes, *told)]
    return join([heading, _missing(experiment, cells), *notes, box])


def _missing(experiment: Experiment, found: list[Found]) -> Html:
    """What is not there, and the command for all of it."""
    if experiment.not_run:
        return paragraph(f"Not run: {experiment.not_run}.")
    states = Counter(one.status.state for one in found)
    lacking = [f"{states['missing']} are missing"] if states["missing"] else []
    lacking += [f"{states['partial']} lack seeds"] if states["partial"] else []
    if not lacking:
        return paragraph("All cells are there.")
    how = code(f"dcnet reproduce {experiment.name}")
    cells = len(found) - states["quoted"]
    return paragraph(f"Of {cells} cells, {' and '.join(lacking)}, which ", how, " runs.")


def _cell(experiment: Experiment, found: Found | None) -> Html:
    if found is None:
        return Html("")
    status = found.status
    parts = [_ours(experiment, found), *([] if status.cell.paper is None else [_paper(status)])]
    if status.difference is not None:
        parts.append(tag("span", f"{status.difference:+.2f}", class_=_place(experiment, status)))
    return join(parts)


def _place(experiment: Experiment, status: CellStatus) -> str:
    """Behind the paper, ahead of it, or so far ahead that it is hardly the same."""
    if (status.misses_by(experiment.higher_is_better) or 0.0) > 0:
        return "behind"
    return "apart" if abs(status.difference or 0.0) > FAR else "ahead"


def _ours(experiment: Experiment, found: Found) -> Html:
    status = found.status
    if status.cell.config is None:
        return tag("span", "quoted", class_="quoted", title="The paper quotes this number from elsewhere.")
    if not found.records:
        return wanted("not run" if experiment.not_run else "missing", _command(experiment, status))
    return number(_shown(status), found.records)


def _shown(status: CellStatus) -> str:
    """The number, and how many seeds there are if they are not all."""
    count = len(status.values) + status.diverged
    return status.ours + (f" ({count} of {status.seeds} seeds)" if count < status.seeds else "")


def _command(experiment: Experiment, status: CellStatus) -> str:
    """Training alone does not make a number that some evaluation finds."""
    if status.cell.evaluation is not None or status.cell.config is None:
        return f"dcnet reproduce {experiment.name}"
    return command_of(status.cell.config)


def _paper(status: CellStatus) -> Html:
    paper = status.cell.paper
    shown = paper if isinstance(paper, str) else f"{paper:.2f}"
    return tag("span", f"paper {shown}", class_="paper")
