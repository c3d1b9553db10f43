"""The cells of an experiment with the records behind them, over as many seeds as there are."""

import re
from dataclasses import dataclass
from typing import Any

from dcnet.experiments import CellStatus, Experiment, chosen, status_of
from dcnet.experiments.known import Known

Record = dict[str, Any]
# Nobody runs more seeds than that.
MOST_SEEDS = 32


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
    best = status_of(experiment, known)
    for seeds in range(experiment.seeds + 1, MOST_SEEDS + 1):
        more = status_of(experiment, known, seeds)
        if not any(status.state == "done" for status in more):
            break
        best = [new if new.state == "done" else old for old, new in zip(best, more, strict=True)]
    return [Found(status, _records(status, known)) for status in best]


def _records(status: CellStatus, known: Known) -> tuple[Record, ...]:
    """Those that the cell has a number from, or that did not converge."""
    found = [record for config in status.cell.configs(status.seeds) if (record := known.record(config)) is not None]
    return tuple(one for one in found if one["status"] == "diverged" or status.cell.value(one) is not None)
