"""A table of the paper as data: the runs behind every cell, and what the paper has there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcnet.spec import unknown
from dcnet.training import RunConfig

NOT_CONVERGED = "N/C"
ERROR: tuple[str | int, ...] = ("results", "test_error")
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        row: where it stands.
        column: where it stands in the row.
        config: the run behind it, whose seed is replaced; None for a number that the paper quotes from elsewhere.
        paper: its value there; "N/C" where that did not converge, None where there is none.
        metric: where the value is in the record of a run, by names and by places in lists.
        factor: what it is multiplied by, such as 100 for a share that is shown in %.
        first_seed: of its runs.
        evaluation: what has to be done with a trained network to get it, of `evaluations`; None for nothing.
    """

    row: str
    column: str
    config: RunConfig | None
    paper: float | str | None = None
    metric: tuple[str | int, ...] = ERROR
    factor: float = 1.0
    first_seed: int = 0
    evaluation: str | None = None

    def configs(self, seeds: int) -> tuple[RunConfig, ...]:
        """The runs of the first seeds."""
        if self.config is None:
            return ()
        own = range(self.first_seed, self.first_seed + seeds)
        return tuple(dataclasses.replace(self.config, seed=seed) for seed in own)

    def value(self, record: Record) -> float | None:
        """The number in the record of a run; None where it has none yet."""
        found: Any = record
        for name in self.metric:
            try:
                found = found[name]
            except (KeyError, IndexError, TypeError):
                return None
        return self.factor * float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True)
class Experiment:
    """Cells in the order of their rows.

    Attributes:
        title: what the numbers are, with their unit.
        order: of the columns; those that it does not have come after it.
        seeds: of each cell, unless one asks for others.
        higher_is_better: of the numbers.
        contest: whether its rows, of one cell each, are rivals, one of which may win.
        not_run: why it is not run here, in one sentence; None where it can be.
        possible: whether it can be run all the same, with the data in that folder.
        notes: what a reader has to know beside the numbers.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    order: tuple[str, ...] = ()
    seeds: int = 1
    higher_is_better: bool = False
    contest: bool = False
    not_run: str | None = None
    possible: Callable[[Path | None], bool] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own, places = f"the experiment {self.name!r}", [(cell.row, cell.column) for cell in self.cells]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ValueError(f"{own} has two cells in the row {twice[0]!r} and the column {twice[1]!r}: give one")
        # Numbers of two columns may be of two kinds, and a row would be its own rival.
        if self.contest and len(self.rows) < len(self.cells):
            row = next(row for row in self.rows if sum(cell.row == row for cell in self.cells) > 1)
            raise ValueError(f"{own} is a contest, and its row {row!r} has several cells: give each rival one")
        if self.seeds < 1:
            raise ValueError(f"{own} has seeds={self.seeds}: give 1 or more")

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        found = dict.fromkeys(cell.column for cell in self.cells)
        return sorted(found, key=lambda column: self.order.index(column) if column in self.order else len(self.order))

    def with_data(self, folder: Path | None) -> Experiment:
        """The same, to be run if the folder has what it needs."""
        ready = self.possible is not None and self.possible(folder)
        return dataclasses.replace(self, not_run=None) if ready else self

    def only(self, beginnings: Iterable[str]) -> Experiment:
        """The same with those cells alone whose column or "row, column" begins with one of these; with all for none."""
        given = tuple(beginnings)
        kept = [
            cell
            for cell in self.cells
            if cell.column.startswith(given) or f"{cell.row}, {cell.column}".startswith(given)
        ]
        return dataclasses.replace(self, cells=tuple(kept)) if given else self

    def cell(self, row: str, column: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


experiments: dict[str, Callable[[], Experiment]] = {}


def register(make: Callable[[], Experiment]) -> Callable[[], Experiment]:
    """Enters the function that makes an experiment under its own name."""
    name = make.__name__
    if name == "all" or name.startswith("figure"):
        raise ValueError(f"{name!r} is no name for an experiment: all and names that begin with figure mean others")
    if name in experiments:
        raise ValueError(f"{name!r} is taken: there is an experiment of that name")
    experiments[name] = make
    return make


def chosen(names: Iterable[str]) -> list[Experiment]:
    """The experiments of these names, all of them for "all", each once."""
    given = list(names)
    for name in given:
        if name != "all" and name not in experiments:
            raise unknown("experiment", name, ["all", *experiments])
    # The paper's tables first.
    everything = sorted(experiments, key=lambda name: (not name.startswith("table"), name))
    wanted = everything if "all" in given else dict.fromkeys(given)
    return [_made(name) for name in wanted]


def _made(name: str) -> Experiment:
    """The experiment, which calls itself what it is asked for by: one that is a copy could be taken for another."""
    made = experiments[name]()
    if made.name != name:
        raise ValueError(f"the experiment of the function {name} is called {made.name!r}: give both the same name")
    return made


def narrowed(found: Iterable[Experiment], beginnings: Iterable[str]) -> list[Experiment]:
    """Each experiment with the cells that it has of these, as `only` has it, if it has any."""
    everything, given = list(found), tuple(beginnings)
    if given and not everything:
        raise ValueError(f"--only {given[0]!r} chooses cells of tables: name a table, such as table3")
    for beginning in given:
        if not beginning:
            raise ValueError("--only is '', with which every row begins: leave it out, or name a row or a column")
        if not any(experiment.only([beginning]).cells for experiment in everything):
            names = "; ".join(dict.fromkeys(name for one in everything for name in (*one.rows, *one.columns)))
            raise ValueError(f"--only {beginning!r} begins no row and no column: there are {names}")
    return [few for experiment in everything if (few := experiment.only(given)).cells]
