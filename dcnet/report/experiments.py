"""Experiments as tables, on a terminal and in Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dcnet.experiments.experiment import Experiment, chosen
from dcnet.experiments.findings import told_of
from dcnet.experiments.known import Known
from dcnet.experiments.status import UNMEASURED, CellStatus, status_of
from dcnet.report.markdown import markdown

LEGEND = "ours (the paper's, the difference)"


def rich_table(experiment: Experiment, found: Sequence[CellStatus]) -> Table:
    """Rows and columns as in the paper."""
    table = Table(title=experiment.title, caption=_caption(experiment))
    table.add_column("", overflow="fold")
    for column in experiment.columns:
        table.add_column(Text(column), justify="right", overflow="fold")
    for row in rows_of(experiment, found):
        table.add_row(*(Text(word) for word in row))
    return table


def markdown_table(experiment: Experiment, found: Sequence[CellStatus]) -> str:
    """The same in Markdown, without the title."""
    return markdown(["", *experiment.columns], rows_of(experiment, found))


def docs_table(name: str, results: Path) -> str:
    """The experiment with what the records in a folder hold of it, one seed unless a deviation is given."""
    (experiment,) = chosen([name])
    # Runs of this machine do not count, since the docs are the same on every machine.
    found = status_of(experiment, Known(results / "no runs", [results]))
    about = f"{experiment.title}: {'; '.join([*_legend(experiment), 'one seed unless a deviation is given'])}:"
    told = " ".join(finding.sentence for finding in told_of(experiment, found))
    return "\n\n".join([about, markdown_table(experiment, found), *([told] if told else [])])


def rows_of(experiment: Experiment, found: Sequence[CellStatus]) -> list[list[str]]:
    """The words of each row, its name first."""
    by_place = {(status.cell.row, status.cell.column): str(status) for status in found}
    return [[row, *(by_place.get((row, column), "") for column in experiment.columns)] for row in experiment.rows]


def summary_lines(experiment: Experiment, found: Sequence[CellStatus]) -> list[str]:
    """What is there, and what it comes to, where that can be told."""
    return [summary(experiment, found), *(f"{experiment.name}: {told}" for told in told_of(experiment, found))]


def summary(experiment: Experiment, found: Sequence[CellStatus]) -> str:
    """One sentence: how many cells are there, and which is furthest from the paper, be it better or worse."""
    wanted = [status for status in found if status.state != "quoted"]
    done = [status for status in wanted if status.state == "done"]
    if experiment.not_run is not None:
        return f"{experiment.name}: not run, since {experiment.not_run}"
    text = f"{experiment.name}: {len(done)} of {len(wanted)} cells are there"
    if partly := sum(status.state == "partial" for status in wanted):
        text += f", and {partly} with fewer seeds"
    if unmeasured := sum(status.unmeasured > 0 for status in done):
        text += f", {unmeasured} of them without their number, which is {UNMEASURED}"
    furthest = furthest_of(found)
    if furthest is None:
        return text
    where = f"{furthest.cell.row}, {furthest.cell.column}"
    return f"{text}; {where} is furthest from the paper, {distance(experiment, furthest)}"


def furthest_of(found: Iterable[CellStatus]) -> CellStatus | None:
    """The cell whose number differs most from the paper's, either way; None where there is nothing to compare."""
    compared = [status for status in found if status.difference is not None]
    return max(compared, key=lambda status: abs(status.difference or 0.0), default=None)


def distance(experiment: Experiment, status: CellStatus) -> str:
    """The difference from the paper, and which way that is."""
    difference = status.difference or 0.0
    worse = (status.misses_by(experiment.higher_is_better) or 0.0) > 0
    return f"{difference:+.2f}" + (f" ({'worse' if worse else 'better'})" if difference else "")


def _legend(experiment: Experiment) -> list[str]:
    """How to read a cell, where the table has a number of the paper beside ours."""
    return [LEGEND] if any(cell.paper is not None for cell in experiment.cells) else []


def _caption(experiment: Experiment) -> str:
    return "\n".join((*_legend(experiment), *experiment.notes))
