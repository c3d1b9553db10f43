"""Tables and summaries of experiments."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from dcnet.experiments.contest import HELD_OUT
from dcnet.experiments.contest_result import ContestState, Standing, find_contest
from dcnet.experiments.experiment import NOT_CONVERGED, Experiment, get_experiment
from dcnet.experiments.findings import FAR, find_closeness, findings_of
from dcnet.experiments.status import UNMEASURED, CellStatus, RecordIndex, status_of
from dcnet.table import Column, Table

# The largest number of rows without a run that the docs name.
MAX_NAMED = 12
LEGEND = "ours (the paper's, the difference)"


def experiment_table(experiment: Experiment, found: Sequence[CellStatus]) -> Table:
    """Returns the table of an experiment, with the rows and columns of the paper."""
    by_place = {(status.cell.row, status.cell.column): str(status) for status in found}
    rows = [[row, *(by_place.get((row, column), "") for column in experiment.columns)] for row in experiment.rows]
    columns = [Column("", wraps=True), *(Column(name, "right", wraps=True) for name in experiment.columns)]
    return Table(columns, rows, experiment.title, [*_legend(experiment), *experiment.notes])


def experiment_tables(experiment: Experiment, found: Sequence[CellStatus], by_side: bool = False) -> list[Table]:
    """Returns the table of an experiment; for a contest, that of its trials, and that of its final runs.

    That of the trials has a row per recipe of a side, or with `by_side` a row per recipe and a column per side.
    """
    state = find_contest(experiment, found)
    if state is None:
        return [experiment_table(experiment, found)]
    finals = [cell for cell in experiment.cells if cell.column != HELD_OUT]
    trials = dataclasses.replace(experiment, cells=tuple(cell for cell in experiment.cells if cell.column == HELD_OUT))
    so_far = dataclasses.replace(experiment, cells=tuple(finals), title="The final runs so far", notes=())
    results = [contest_table(state)] if state.standings else [experiment_table(so_far, found)] if finals else []
    return [trial_table(trials, found) if by_side else experiment_table(trials, found), *results]


def trial_table(trials: Experiment, found: Sequence[CellStatus]) -> Table:
    """Returns the held-out errors of a contest, with a row per recipe and a column per side."""
    errors = {status.cell.row: str(status) for status in found if status.cell.column == HELD_OUT}
    places = [row.split(": ", 1) for row in trials.rows]
    sides, recipes = dict.fromkeys(side for side, _ in places), dict.fromkeys(recipe for _, recipe in places)
    rows = [[recipe, *(errors.get(f"{side}: {recipe}", "") for side in sides)] for recipe in recipes]
    columns = [Column(HELD_OUT, wraps=True), *(Column(side, "right", wraps=True) for side in sides)]
    return Table(columns, rows, trials.title, [*_legend(trials), *trials.notes])


def overview(statuses: Iterable[tuple[Experiment, Sequence[CellStatus]]]) -> Table:
    """Returns a table with one row per experiment: cells that are done and missing, and how many are near the paper."""
    rows = []
    for experiment, found in statuses:
        states = Counter(one.state for one in found)
        near = find_closeness(experiment, found)
        missing = "not run" if experiment.not_run else str(states["missing"])
        compared = f"{near.near} of {near.cells}" if near else ""
        rows.append([experiment.name, str(states["done"]), str(states["partial"]), missing, compared])
    headings = ("experiment", "cells done", "with fewer seeds", "missing", f"within {FAR:.2f} of the paper")
    columns = [Column(heading, "right" if rank else "left", wraps=True) for rank, heading in enumerate(headings)]
    notes = ["Name an experiment for its table, as in dcnet reproduce table3 --status."]
    return Table(columns, rows, "All experiments", notes)


def contest_table(state: ContestState) -> Table:
    """Returns the final results of the sides of a contest, the best first."""
    cells = _standing_cells(state)
    columns = [Column(heading, "left" if heading in ("side", "recipe") else "right", wraps=True) for heading in cells]
    rows = [[cell(one) for cell in cells.values()] for one in state.standings]
    note = (
        "p: the probability of such a difference from the reference by chance, by Welch's t-test, with Holm's "
        "correction for the number of challengers, times the number of references if the reference is ahead"
    )
    more = (
        f". Sorted by {state.measure}, which p is for."
        if state.others
        else "; seconds of training, which runs in parallel share, also of runs that diverged."
    )
    title = "The best recipe of each side" + (", errors in %" if state.others else "")
    return Table(columns, rows, title, [note + more])


def _standing_cells(state: ContestState) -> dict[str, Callable[[Standing], str]]:
    """Returns the cells of a side by the heading of their column."""

    def p(one: Standing) -> str:
        return "reference" if one.side == state.reference else "" if one.p is None else f"{one.p:.2g}"

    if state.others:
        # Few and narrow columns, so that the table fits into a terminal.
        errors = {found.measure: partial(_standing_error, found) for found in state.results}
        return {"side": lambda one: f"{one.side}: {one.recipe}", **errors, "p": p}
    return {
        "side": lambda one: one.side,
        "recipe": lambda one: one.recipe,
        f"{state.measure}, %": partial(_standing_error, state),
        "seeds": lambda one: str(len(one.errors) + one.diverged),
        "p": p,
        "s per final run": lambda one: f"{one.seconds:,.0f}",
        "s of all runs": lambda one: f"{one.all_seconds:,.0f}",
    }


def _standing_error(state: ContestState, side: Standing) -> str:
    """Returns the error of a side by the measure of the state."""
    (one,) = (found for found in state.standings if found.side == side.side)
    spread = "" if one.deviation is None else f" ± {one.deviation:.2f}"
    diverged = f"{one.diverged} {NOT_CONVERGED}" if one.diverged else ""
    return ", ".join(part for part in (f"{one.mean:.2f}{spread}" if one.errors else "", diverged) if part)


def docs_table(name: str, results: Path) -> str:
    """Returns the table and findings of an experiment in Markdown, from the records in a folder."""
    # Ignore local runs, so that the docs are the same everywhere.
    index = RecordIndex(results / "no runs", [results])
    experiment = get_experiment(name).at(index.record)
    found = status_of(experiment, index)
    about = f"{experiment.title}. Cells: {'; '.join([*_legend(experiment), _seeds_legend(found)])}."
    findings = " ".join(str(finding) for finding in findings_of(experiment, found).values())
    later = _rows_without_numbers(experiment, found)
    kept = dataclasses.replace(experiment, cells=tuple(cell for cell in experiment.cells if cell.row not in later))
    shown = experiment_tables(kept, [one for one in found if one.cell.row not in later], by_side=True)
    named = "; ".join(later) if len(later) <= MAX_NAMED else f"{len(later)} of {len(experiment.rows)} rows"
    missing = [f"Without a run so far: {named}."] if later else []
    return "\n\n".join([about, *(table.markdown() for table in shown), *missing, *([findings] if findings else [])])


def _rows_without_numbers(experiment: Experiment, found: Sequence[CellStatus]) -> list[str]:
    """Returns the rows with neither a run nor a number of the paper; none if that holds for all rows."""
    shown = {one.cell.row for one in found if one.state != "missing" or one.cell.paper is not None}
    return [row for row in experiment.rows if shown and row not in shown]


def summary_lines(experiment: Experiment, found: Sequence[CellStatus]) -> list[str]:
    """Returns the summary and the findings of an experiment, one sentence each."""
    return [
        summary(experiment, found),
        *(f"{experiment.name}: {finding}" for finding in findings_of(experiment, found).values()),
    ]


def summary(experiment: Experiment, found: Sequence[CellStatus]) -> str:
    """Returns one sentence: the number of finished cells, and the largest difference from the paper."""
    wanted = [status for status in found if status.state != "quoted"]
    done = [status for status in wanted if status.state == "done"]
    if experiment.not_run is not None:
        return f"{experiment.name}: not run: {experiment.not_run}"
    text = f"{experiment.name}: {len(done)} of {len(wanted)} cells done"
    if partly := sum(status.state == "partial" for status in wanted):
        text += f", {partly} with fewer seeds"
    if unmeasured := sum(status.unmeasured > 0 for status in done):
        text += f", {unmeasured} of them without a number ({UNMEASURED})"
    furthest = furthest_of(found)
    if furthest is None:
        return text
    where = f"{furthest.cell.row}, {furthest.cell.column}"
    return f"{text}; largest difference from the paper: {distance(experiment, furthest)} at {where}"


def furthest_of(found: Iterable[CellStatus]) -> CellStatus | None:
    """Returns the cell with the largest difference from the paper, better or worse; None if no cell has one."""
    compared = [status for status in found if status.difference is not None]
    return max(compared, key=lambda status: abs(status.difference or 0.0), default=None)


def distance(experiment: Experiment, status: CellStatus) -> str:
    """Formats the difference from the paper, and whether it is better or worse."""
    difference = status.difference or 0.0
    worse = (status.misses_by(experiment.higher_is_better) or 0.0) > 0
    return f"{difference:+.2f}" + (f" ({'worse' if worse else 'better'})" if difference else "")


def _legend(experiment: Experiment) -> list[str]:
    """Explains the format of cells, if the paper has a number for any."""
    return [LEGEND] if any(cell.paper is not None for cell in experiment.cells) else []


def _seeds_legend(found: Sequence[CellStatus]) -> str:
    """Describes the number of seeds of the cells."""
    counts = {len(status.values) + status.diverged for status in found} - {0}
    if len(counts) > 1:
        return "one seed, or mean ± standard deviation of several seeds"
    seeds = counts.pop() if counts else 1
    return "one seed" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
