"""Experiments as tables, on a terminal and in Markdown."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dcnet.experiments.experiment import Experiment, chosen
from dcnet.experiments.known import Known
from dcnet.experiments.status import CellStatus, status_of
from dcnet.report.markdown import markdown

LEGEND = "ours (the paper's, the difference)"
# The most that any experiment is run with; of a cell with fewer, all that there are count.
SEEDS = 3


def rich_table(experiment: Experiment, found: Sequence[CellStatus]) -> Table:
    """Rows and columns as in the paper."""
    table = Table(title=experiment.title, caption=_caption(experiment))
    table.add_column("", overflow="fold")
    for column in experiment.columns:
        table.add_column(Text(column), justify="right")
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
    found = status_of(experiment, Known(results / "no runs", [results]), SEEDS)
    about = f"{experiment.title}: {LEGEND}; one seed unless a deviation is given:"
    return f"{about}\n\n{markdown_table(experiment, found)}"


def rows_of(experiment: Experiment, found: Sequence[CellStatus]) -> list[list[str]]:
    """The words of each row, its name first."""
    by_place = {(status.cell.row, status.cell.column): str(status) for status in found}
    return [[row, *(by_place.get((row, column), "") for column in experiment.columns)] for row in experiment.rows]


def summary(experiment: Experiment, found: Sequence[CellStatus]) -> str:
    """One sentence: how many cells are there, and which misses by most."""
    wanted = [status for status in found if status.state != "quoted"]
    done = sum(status.state == "done" for status in wanted)
    if experiment.not_run is not None:
        return f"{experiment.name}: not run, since {experiment.not_run}"
    text = f"{experiment.name}: {done} of {len(wanted)} cells are there"
    misses = [(status.misses_by(experiment.higher_is_better) or 0.0, status) for status in wanted]
    worst, status = max(misses, key=lambda miss: miss[0], default=(0.0, None))
    if status is None or worst <= 0:
        return text
    return f"{text}; {status.cell.row}, {status.cell.column} misses the paper by most, {worst:.2f}"


def _caption(experiment: Experiment) -> str:
    return "\n".join((LEGEND, *experiment.notes))
