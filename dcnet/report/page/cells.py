"""The cells of an experiment with the records behind them, over as many seeds as there are."""

import re
from dataclasses import dataclass
from typing import Any

from dcnet.experiments import CellStatus, Experiment, chosen, status_of
from dcnet.experiments.known import Known
from dcnet.experiments.status import guesses, records_of

Record = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A cell as it stands, and the records of its runs."""

    status: CellStatus
    records: tuple[Record, ...]


def all_experiments() -> list[Experiment]:
    """The tables of the paper by their numbers, and then whatever else there is."""
    return sorted(chosen(["all"]), key=lambda one: (not re.match(r"table\d", one.name), one.name))


def found_in(experiment: Experiment, known: Known) -> list[Found]:
    """Every cell with all seeds that it has, be it more than the experiment asks for."""
    pairs = zip(status_of(experiment, known), records_of(experiment, known), strict=True)
    return [Found(status, _counted(status, records)) for status, (_, records) in pairs]


def _counted(status: CellStatus, records: list[Record]) -> tuple[Record, ...]:
    """Those that the cell has a number from, or that did not converge."""
    return tuple(one for one in records if not _converged(one) or status.cell.value(one) is not None)


def _converged(record: Record) -> bool:
    return record["status"] != "diverged" and not guesses(record)
