"""How many cells of a table come as near to the paper as two trainings of the same network should."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Experiment
from dcnet.experiments.finding import Finding
from dcnet.experiments.status import CellStatus

# In points: who is further from the paper than that has hardly done the same.
FAR = 1.0
# So many are named one by one.
NAMED = 3


@dataclass(frozen=True)
class Nearness(Finding):
    """The cells that have something of ours and of the paper's.

    Attributes:
        cells: how many there are.
        behind: those that are worse than the paper by more than `FAR`, by row, column and how much; None for how much
            where ours did not converge.
    """

    cells: int
    behind: tuple[tuple[str, str, float | None], ...]

    def described(self) -> dict[str, Any]:
        return {"within": FAR, "cells": self.cells, "behind": [list(cell) for cell in self.behind]}

    def __str__(self) -> str:
        near, noun = self.cells - len(self.behind), "cell" if self.cells == 1 else "cells"
        verb = "is" if near == 1 else "are"
        text = f"of {self.cells} {noun} to compare, {near} {verb} within {FAR:.2f} of the paper or better"
        if not 0 < len(self.behind) <= NAMED:
            return text
        return f"{text}; not {'; '.join(_named(*cell) for cell in self.behind)}"


def nearness_of(experiment: Experiment, found: Sequence[CellStatus]) -> Nearness | None:
    """Of the cells that can be compared; None where there are none."""
    compared = [status for status in found if _comparable(status)]
    behind = tuple(
        (status.cell.row, status.cell.column, status.difference)
        for status in compared
        if _is_behind(status, experiment.higher_is_better)
    )
    return Nearness(len(compared), behind) if compared else None


def _comparable(status: CellStatus) -> bool:
    """Whether both sides have a number, or that it did not converge."""
    return status.cell.paper is not None and bool(status.values or status.diverged)


def _is_behind(status: CellStatus, higher_is_better: bool) -> bool:
    """That the paper's did not converge is nothing to be behind of."""
    if status.cell.paper == NOT_CONVERGED:
        return False
    misses = status.misses_by(higher_is_better)
    return misses is None or misses > FAR


def _named(row: str, column: str, difference: float | None) -> str:
    return f"{row} in {column} ({NOT_CONVERGED if difference is None else f'{difference:+.2f}'})"
