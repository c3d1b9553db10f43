"""Experiments: tables as data, with the runs that each cell comes from and the paper's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from dcnet.operator import PLAIN
from dcnet.registry import Registry
from dcnet.training import Record, RunConfig, recipe

NOT_CONVERGED = "N/C"
# The most rows and columns that an error message lists.
MOST_CHOICES = 40
ERROR: tuple[str | int, ...] = ("results", "test_error")
# Returns the record of a finished run; None if there is none.
Find = Callable[[RunConfig], Record | None]


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        row: name of the row.
        column: name of the column.
        config: the config of the runs, with any seed; None for a number that the paper quotes from elsewhere.
        paper: the paper's number; "N/C" if the paper's run did not converge, None if the paper has no number.
        metric: path of the number in the record of a run, as keys and list indices.
        factor: multiplies the number, such as 100 for a fraction shown in %.
        first_seed: the seed of the first run; the next runs have the next seeds.
        evaluation: name of the evaluation that measures the number; None if training alone does.
        seeds: number of runs; None for that of the experiment.
        target: a number to reach; the table says how many runs did. None for no target.
    """

    row: str
    column: str
    config: RunConfig | None
    paper: float | str | None = None
    metric: tuple[str | int, ...] = ERROR
    factor: float = 1.0
    first_seed: int = 0
    evaluation: str | None = None
    seeds: int | None = None
    target: float | None = None

    def configs(self, seeds: int) -> tuple[RunConfig, ...]:
        """Returns the configs of the first `seeds` runs, or of as many runs as the cell has."""
        if self.config is None:
            return ()
        own = range(self.first_seed, self.first_seed + (self.seeds or seeds))
        return tuple(dataclasses.replace(self.config, seed=seed) for seed in own)

    def value(self, record: Record) -> float | None:
        """Returns the number of the cell from the record of a run; None if it is missing."""
        found = record.value(self.metric)
        return self.factor * float(found) if isinstance(found, int | float) else None


class Rules(Protocol):
    """Rules by which the cells of an experiment depend on the records."""

    def cells(self, find: Find) -> tuple[Cell, ...]:
        """Returns the cells, given the records."""

    def choices(self) -> list[str]:
        """Returns the names that `only` selects from."""

    def only(self, prefixes: tuple[str, ...]) -> Rules:
        """Returns the rules for the rows that start with one of the prefixes."""

    def small(self, change: Callable[[RunConfig], RunConfig]) -> Rules:
        """Returns rules with few cells and changed configs, for smoke tests."""

    def runs(self, seeds: int) -> int:
        """Returns the number of runs in the end."""


@dataclass(frozen=True)
class Experiment:
    """A table as data.

    Attributes:
        title: describes the numbers, with their unit.
        cells: the cells, row by row.
        order: names of the first columns; all others follow.
        seeds: default number of runs per cell.
        higher_is_better: whether larger numbers are better.
        contest: whether the rows, with one cell each, compete for the best result.
        hunt: whether rows, named "setting: measure", compete for the smallest difference from the paper.
        collapses: whether the rows train in one step of an attack, and may collapse; see `dcnet.experiments.collapse`.
        not_run: why the experiment is not run by default, in one sentence.
        possible: a function of the data folder that tells whether the experiment can be run nevertheless.
        notes: sentences shown below the table.
        rules: rules by which the cells depend on the records; `cells` has those without any record.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    order: tuple[str, ...] = ()
    seeds: int = 1
    higher_is_better: bool = False
    contest: bool = False
    hunt: bool = False
    collapses: bool = False
    not_run: str | None = None
    possible: Callable[[Path | None], bool] | None = None
    notes: tuple[str, ...] = ()
    rules: Rules | None = None

    def __post_init__(self) -> None:
        own, places = f"the experiment {self.name!r}", [(cell.row, cell.column) for cell in self.cells]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ValueError(f"{own} has two cells in the row {twice[0]!r} and the column {twice[1]!r}: give one")
        # Cells of different columns may have different units, and a row must not compete with itself.
        if self.contest and len(self.rows) < len(self.cells):
            row = next(row for row in self.rows if sum(cell.row == row for cell in self.cells) > 1)
            raise ValueError(f"{own} is a contest, but its row {row!r} has several cells: give one cell per row")
        if self.seeds < 1:
            raise ValueError(f"{own} has seeds={self.seeds}: give 1 or more")

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        found = dict.fromkeys(cell.column for cell in self.cells)
        return sorted(found, key=lambda column: self.order.index(column) if column in self.order else len(self.order))

    @property
    def choices(self) -> list[str]:
        """The names that `only` selects from."""
        return [*self.rows, *self.columns] if self.rules is None else self.rules.choices()

    def with_data(self, folder: Path | None) -> Experiment:
        """Returns the experiment, without `not_run` if the folder has its data."""
        ready = self.possible is not None and self.possible(folder)
        return dataclasses.replace(self, not_run=None) if ready else self

    def at(self, find: Find) -> Experiment:
        """Returns the experiment with the cells that follow from the records."""
        return self if self.rules is None else dataclasses.replace(self, cells=self.rules.cells(find))

    def only(self, prefixes: Iterable[str]) -> Experiment:
        """Keeps the cells whose column or "row, column" starts with one of the prefixes; all if there are none."""
        given = tuple(prefixes)
        if self.rules is not None and given:
            rules = self.rules.only(given)
            return dataclasses.replace(self, cells=rules.cells(lambda config: None), rules=rules)
        kept = [
            cell
            for cell in self.cells
            if cell.column.startswith(given) or f"{cell.row}, {cell.column}".startswith(given)
        ]
        return dataclasses.replace(self, cells=tuple(kept)) if given else self

    def cell(self, row: str, column: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


# By column: the angle, and changes to the recipe.
Columns = Mapping[str, tuple[str, Mapping[str, Any]]]


def paper_grid(
    name: str,
    columns: Columns,
    paper: Mapping[str, Sequence[float | str | None]],
    settings: Mapping[str, Any] | None = None,
    **cell: Any,
) -> tuple[Cell, ...]:
    """Returns the cells of a table with one row per magnitude; the row "baseline" has plain networks.

    Args:
        name: name of the recipe.
        columns: the angle of each column, and its changes to the recipe.
        paper: the paper's numbers by row, in the order of the columns; None where the table has no cell.
        settings: changes to the recipe for all cells.
        cell: more attributes of all cells.
    """
    cells = []
    for row, values in paper.items():
        for (column, (angle, changes)), value in zip(columns.items(), values, strict=True):
            if value is not None:
                operator = PLAIN if row == "baseline" else f"{row}-{angle}"
                config = recipe(name, operator=operator, **{**(settings or {}), **changes})
                cells.append(Cell(row, column, config, value, **cell))
    return tuple(cells)


experiments: Registry[Callable[[], Experiment]] = Registry(
    "an experiment",
    discover="dcnet.experiments.catalogue",
    normalize=lambda name: name.replace("-", "_"),
    extra=lambda: ["all"],
)


def register(make: Callable[[], Experiment]) -> Callable[[], Experiment]:
    """Registers a function that returns an experiment of the same name; used as a decorator."""
    name = make.__name__
    if name == "all" or name.startswith("figure"):
        raise ValueError(f"{name!r} is a reserved name: experiments cannot be named all or figure...")
    return experiments.register(make)


# Takes a trained network in evaluation mode, the record of its run, the folder of all runs, and the data folder.
Evaluate = Callable[[nn.Module, Record, Path, Path | None], dict[str, Any]]

evaluations: Registry[Evaluate] = Registry("an evaluation", discover="dcnet.experiments.catalogue")


# Names of evaluations that need no other network, so that they run right after training.
at_end_of_run: set[str] = set()


def register_evaluation(name: str, at_end: bool = False) -> Callable[[Evaluate], Evaluate]:
    """Returns a decorator that registers an evaluation of trained networks; `at_end` if it needs no other network."""
    if at_end:
        at_end_of_run.add(name)
    return lambda evaluate: evaluations.add(name, evaluate, module=evaluate.__module__)


def get_experiment(name: str) -> Experiment:
    """Returns the registered experiment of this name."""
    own = experiments.canonical(name)
    experiment = experiments[own]()
    # Guards against a copied function whose experiment was not renamed.
    if experiment.name != own:
        raise ValueError(f"the function {own} returns the experiment {experiment.name!r}: give both the same name")
    return experiment


def select_experiments(names: Iterable[str]) -> list[Experiment]:
    """Returns the experiments of these names without duplicates; "all" selects every one, tables of the paper first."""
    given = list(dict.fromkeys(name if name == "all" else experiments.canonical(name) for name in names))
    if "all" in given:
        given = sorted(experiments, key=lambda name: (not name.startswith("table"), name))
    return [get_experiment(name) for name in given]


def select_cells(selected: Iterable[Experiment], prefixes: Iterable[str]) -> list[Experiment]:
    """Applies `Experiment.only` to each experiment, and drops experiments without remaining cells."""
    everything, given = list(selected), tuple(prefixes)
    if given and not everything:
        raise ValueError(
            f"--only {given[0]!r} selects cells of tables, but no table is given: name one, such as table3"
        )
    for prefix in given:
        if not prefix:
            raise ValueError("--only is '', which matches every cell: omit it, or give a row or column")
        if not any(experiment.only([prefix]).cells for experiment in everything):
            names = list(dict.fromkeys(name for one in everything for name in one.choices))
            more = f"; ... ({len(names) - MOST_CHOICES} more)" if len(names) > MOST_CHOICES else ""
            shown = "; ".join(names[:MOST_CHOICES]) + more
            raise ValueError(f"--only {prefix!r} matches no row or column: choose from {shown}")
    return [few for experiment in everything if (few := experiment.only(given)).cells]
