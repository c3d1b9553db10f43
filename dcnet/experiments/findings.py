"""Findings of a table: how close it is to the paper, its ranking, the winner of a contest, the result of a hunt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from dcnet.experiments.collapse import CollapseCount, find_collapses
from dcnet.experiments.contest_result import ContestState, find_contest
from dcnet.experiments.experiment import ERROR, NOT_CONVERGED, Experiment
from dcnet.experiments.status import DIGITS, CellStatus, pooled_deviation

# In percentage points; a result that differs by more hardly comes from the same setup.
FAR = 1.0
# The largest number of cells that a sentence lists.
MAX_NAMED = 3
# In standard deviations of one run: 5 % of pairs of runs of the same network differ by more.
SEED_NOISE = 2 * math.sqrt(2)
# Student's t at 5 %, two-sided, for 1, 2, ... degrees of freedom. The last is used for more, slightly conservative.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


# Row and column of a cell, and its difference from the paper; None if one of the two runs did not converge.
Place = tuple[str, str, float | None]


@dataclass(frozen=True)
class Closeness:
    """How many cells are close to the paper, on either side.

    Attributes:
        cells: number of cells with both a result and the paper's number.
        better: cells that are better than the paper by more than `FAR`, or converged only here.
        worse: cells that are worse than the paper by more than `FAR`, or converged only in the paper.
    """

    cells: int
    better: tuple[Place, ...] = ()
    worse: tuple[Place, ...] = ()

    @property
    def near(self) -> int:
        """The number of cells within `FAR` of the paper."""
        return self.cells - len(self.better) - len(self.worse)

    def __str__(self) -> str:
        text = f"{self.near} of {self.cells} compared cells {_is(self.near)} within {FAR:.2f} of the paper"
        apart = {"better": (self.better, "converges only here"), "worse": (self.worse, NOT_CONVERGED)}
        parts = [_describe_apart(how, cells, lacking) for how, (cells, lacking) in apart.items() if cells]
        return "; ".join([text, *parts]) + "."

    def to_json(self) -> dict[str, Any]:
        apart = {name: [list(cell) for cell in getattr(self, name)] for name in ("better", "worse")}
        return {"within": FAR, "cells": self.cells, "near": self.near, **apart}


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _describe_apart(how: str, cells: Sequence[Place], lacking: str) -> str:
    """Describes the cells that are better or worse; `lacking` replaces the difference if there is none."""
    text = f"{len(cells)} {_is(len(cells))} {how} by more"
    if len(cells) > MAX_NAMED:
        return text
    differences = [lacking if difference is None else f"{difference:+.2f}" for _, _, difference in cells]
    names = [f"{row} in {column} ({shown})" for (row, column, _), shown in zip(cells, differences, strict=True)]
    return f"{text}: {', '.join(names)}"


def find_closeness(experiment: Experiment, statuses: Sequence[CellStatus]) -> Closeness | None:
    """Compares the cells with the paper; returns None if no cell has both a result and the paper's number."""
    compared = [one for one in statuses if one.cell.paper is not None and (one.values or one.diverged)]
    gains = [(one, _gain(one, experiment.higher_is_better)) for one in compared]
    better, worse = (
        tuple((one.cell.row, one.cell.column, one.difference) for one, gain in gains if sign * gain > FAR)
        for sign in (1, -1)
    )
    return Closeness(len(compared), better, worse) if compared else None


def _gain(status: CellStatus, higher_is_better: bool) -> float:
    """Returns how much better our result is than the paper's; infinite if only one of the two runs converged."""
    if status.difference is not None:
        return status.difference if higher_is_better else -status.difference
    ours, papers = bool(status.values), status.cell.paper != NOT_CONVERGED
    return 0.0 if ours == papers else math.inf if ours else -math.inf


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
    """Returns the critical difference of the two means by Student's t-test at 5 %."""
    first, second = len(one.values), len(other.values)
    student = STUDENT[min(first + second - 2, len(STUDENT)) - 1]
    return student * (pooled_deviation((one, other)) or 0.0) * math.sqrt(1 / first + 1 / second)


@dataclass(frozen=True)
class Nearest:
    """The settings of a hunt that are nearest to the paper.

    Attributes:
        settings: number of compared settings.
        by_measure: for each measure, and for "all measures", the nearest setting and its mean absolute difference.
    """

    settings: int
    by_measure: dict[str, tuple[str, float]]

    def __str__(self) -> str:
        parts = [f'"{setting}" in {measure} ({gap:.2f})' for measure, (setting, gap) in self.by_measure.items()]
        return f"Of {self.settings} complete settings, nearest to the paper, by mean difference: {', '.join(parts)}."

    def to_json(self) -> dict[str, Any]:
        return {"settings": self.settings, "by_measure": {name: list(found) for name, found in self.by_measure.items()}}


def find_nearest(experiment: Experiment, statuses: Sequence[CellStatus]) -> Nearest | None:
    """Finds the nearest settings of a hunt; returns None unless two settings are complete.

    A setting without a cell in some column has there the result of the first setting.
    """
    if not experiment.hunt:
        return None
    gaps: dict[str, dict[tuple[str, str], float]] = {}
    for one in statuses:
        if one.cell.paper is not None:
            setting, measure = one.cell.row.split(": ", 1)
            gap = math.nan if one.difference is None else abs(one.difference)
            gaps.setdefault(setting, {})[measure, one.cell.column] = gap
    first = next(iter(gaps.values()), {})
    whole = {setting: {**first, **own} for setting, own in gaps.items()}
    complete = {setting: own for setting, own in whole.items() if not any(map(math.isnan, own.values()))}
    if len(complete) < 2:
        return None
    measures = {"all measures": {*first}, **{name: {key for key in first if key[0] == name} for name, _ in first}}
    return Nearest(len(complete), {name: _nearest(complete, keys) for name, keys in measures.items()})


def _nearest(gaps: dict[str, dict[tuple[str, str], float]], keys: set[tuple[str, str]]) -> tuple[str, float]:
    """Returns the setting with the smallest mean gap over these cells, and the mean."""
    means = {setting: math.fsum(own[key] for key in keys) / len(keys) for setting, own in gaps.items()}
    best = min(means, key=means.__getitem__)
    return best, means[best]


# A statement about a table; `str()` returns it as a sentence.
Finding = Closeness | RowOrder | Winner | Nearest | ContestState | CollapseCount
# The functions by the names of the findings in JSON.
FINDINGS = {
    "near": find_closeness,
    "order": find_order,
    "winner": find_winner,
    "nearest": find_nearest,
    "contest": find_contest,
    "collapses": find_collapses,
}


def findings_of(experiment: Experiment, statuses: Sequence[CellStatus]) -> dict[str, Finding]:
    """Returns all findings that exist for these cells, by name."""
    findings = {name: find(experiment, statuses) for name, find in FINDINGS.items()}
    return {name: finding for name, finding in findings.items() if finding is not None}
