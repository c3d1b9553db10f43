"""Findings of a table: how close it is to the paper, whether rows rank as in the paper, and the winner of a contest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from dcnet.experiments.contest import ContestState, find_contest
from dcnet.experiments.experiment import ERROR, NOT_CONVERGED, Experiment
from dcnet.experiments.status import DIGITS, CellStatus, pooled_deviation

# In percentage points; a result that is worse by more hardly comes from the same setup.
FAR = 1.0
# The largest number of cells that a sentence lists.
MAX_NAMED = 3
# In standard deviations of one run: 5 % of pairs of runs of the same network differ by more.
SEED_NOISE = 2 * math.sqrt(2)
# Student's t at 5 %, two-sided, for 1, 2, ... degrees of freedom. The last is used for more, slightly conservative.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Closeness:
    """How many cells are close to the paper.

    Attributes:
        cells: number of cells with both a result and the paper's number.
        behind: row, column and difference of cells that are worse than the paper by more than `FAR`; the difference is
            None if our run diverged.
    """

    cells: int
    behind: tuple[tuple[str, str, float | None], ...]

    def __str__(self) -> str:
        close = self.cells - len(self.behind)
        verb = "is" if close == 1 else "are"
        text = f"{close} of {self.cells} compared cells {verb} within {FAR:.2f} of the paper or better"
        if not 0 < len(self.behind) <= MAX_NAMED:
            return f"{text}."
        return f"{text}; not {'; '.join(_name_cell(*cell) for cell in self.behind)}."

    def to_json(self) -> dict[str, Any]:
        return {"within": FAR, "cells": self.cells, "behind": [list(cell) for cell in self.behind]}


def find_closeness(experiment: Experiment, statuses: Sequence[CellStatus]) -> Closeness | None:
    """Compares the cells with the paper; returns None if no cell has both a result and the paper's number."""
    compared = [one for one in statuses if one.cell.paper is not None and (one.values or one.diverged)]
    behind = tuple(
        (one.cell.row, one.cell.column, one.difference)
        for one in compared
        if _is_behind(one, experiment.higher_is_better)
    )
    return Closeness(len(compared), behind) if compared else None


def _is_behind(status: CellStatus, higher_is_better: bool) -> bool:
    """Whether a cell is worse than the paper by more than `FAR`; never if the paper's run did not converge."""
    misses = status.misses_by(higher_is_better)
    return status.cell.paper != NOT_CONVERGED and (misses is None or misses > FAR)


def _name_cell(row: str, column: str, difference: float | None) -> str:
    return f"{row} in {column} ({NOT_CONVERGED if difference is None else f'{difference:+.2f}'})"


@dataclass(frozen=True)
class RowOrder:
    """How many pairs of cells in a column rank as in the paper, of those that differ in the paper by more than noise.

    Attributes:
        apart: the seed noise, estimated from cells with several seeds.
        pairs: number of compared pairs.
        turned: column and both rows of the pairs that rank the other way.
    """

    apart: float
    pairs: int
    turned: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        same = self.pairs - len(self.turned)
        pairs = "1 pair that differs" if self.pairs == 1 else f"the {self.pairs} pairs that differ"
        verb = "ranks" if same == 1 else "rank"
        text = f"{same} of {pairs} by more than seed noise ({self.apart:.2f}) {verb} as in the paper"
        others = [f"{first} and {second} in {column}" for column, first, second in self.turned]
        return f"{text}; not {'; '.join(others)}." if others else f"{text}."

    def to_json(self) -> dict[str, Any]:
        return {"apart": self.apart, "pairs": self.pairs, "turned": [list(pair) for pair in self.turned]}


def find_order(experiment: Experiment, statuses: Sequence[CellStatus]) -> RowOrder | None:
    """Compares the ranking with the paper, for tables of test errors.

    Returns None if no cell has several seeds, or no pair can be compared.
    """
    deviation = pooled_deviation(statuses)
    if deviation is None or any(one.cell.metric != ERROR for one in statuses):
        return None
    apart, pairs = SEED_NOISE * deviation, list[tuple[CellStatus, CellStatus]]()
    compared = sorted((one for one in statuses if one.difference is not None), key=lambda one: one.cell.column)
    for _, column in groupby(compared, key=lambda one: one.cell.column):
        pairs += [pair for pair in combinations(column, 2) if abs(_paper_difference(*pair)) > apart]
    turned = tuple(
        (one.cell.column, one.cell.row, other.cell.row)
        for one, other in pairs
        if _paper_difference(one, other) * (_mean(one) - _mean(other)) <= 0
    )
    return RowOrder(apart, len(pairs), turned) if pairs else None


def _paper_difference(one: CellStatus, other: CellStatus) -> float:
    return float(one.cell.paper or 0.0) - float(other.cell.paper or 0.0)


@dataclass(frozen=True)
class Winner:
    """The best and the second-best row of a contest.

    Attributes:
        best: name of the best row.
        rival: name of the second-best row.
        by: difference of their means, rounded as in tables.
        chance: the difference that two sets of runs of the same network exceed in 5 % of cases.
    """

    best: str
    rival: str
    by: float
    chance: float

    @property
    def wins(self) -> bool:
        return self.by > self.chance

    def __str__(self) -> str:
        # Quote the names, since they may contain commas.
        ahead = f'"{self.best}" is ahead of "{self.rival}" by {self.by:.2f}'
        if self.wins:
            return f"{ahead} and wins: seed noise is {self.chance:.2f}."
        return f"{ahead}, within seed noise ({self.chance:.2f}): no winner."

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "wins": self.wins}


def find_winner(experiment: Experiment, statuses: Sequence[CellStatus]) -> Winner | None:
    """Finds the winner of a contest; returns None unless every cell has several runs that all converged."""
    if not experiment.contest or len(statuses) < 2 or any(one.deviation is None or one.diverged for one in statuses):
        return None
    best, rival = sorted(statuses, key=_mean, reverse=experiment.higher_is_better)[:2]
    by = round(abs(round(_mean(best), DIGITS) - round(_mean(rival), DIGITS)), DIGITS)
    return Winner(best.cell.row, rival.cell.row, by, _chance_difference(best, rival))


def _mean(status: CellStatus) -> float:
    return status.mean or 0.0


def _chance_difference(one: CellStatus, other: CellStatus) -> float:
    """Returns the critical difference of the two means by Student's t test at 5 %."""
    first, second = len(one.values), len(other.values)
    student = STUDENT[min(first + second - 2, len(STUDENT)) - 1]
    return student * (pooled_deviation((one, other)) or 0.0) * math.sqrt(1 / first + 1 / second)


# A statement about a table; `str()` returns it as a sentence.
Finding = Closeness | RowOrder | Winner | ContestState
# The functions by the names of the findings in JSON.
FINDINGS = {"near": find_closeness, "order": find_order, "winner": find_winner, "contest": find_contest}


def findings_of(experiment: Experiment, statuses: Sequence[CellStatus]) -> dict[str, Finding]:
    """Returns all findings that exist for these cells, by name."""
    findings = {name: find(experiment, statuses) for name, find in FINDINGS.items()}
    return {name: finding for name, finding in findings.items() if finding is not None}
