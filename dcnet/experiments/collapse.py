"""Collapse of adversarial training in one step: the network withstands one step of an attack, but not many.

Counts the collapsed runs of each row of a table, and compares decoupled rows with plain ones."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.contest_result import SIGNIFICANT, Standing, holm, welch_p
from dcnet.experiments.experiment import Experiment
from dcnet.experiments.status import CellStatus

# The columns of the table, and the start of the names of rows that others are compared with.
FGSM, PGD, REFERENCE = "FGSM", "PGD-50", "plain"
# A run has collapsed if its accuracy under PGD, in %, is below this number and below this share of that under FGSM.
LOW, SHARE = 20.0, 0.5


def collapsed(fgsm: float, pgd: float) -> bool:
    """Whether a network with these accuracies in % has collapsed."""
    return pgd < LOW and pgd < SHARE * fgsm


def fisher_p(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Returns the two-sided p-value of Fisher's exact test for two pairs: a count, and the number of runs.

    It is the probability, given the sum of the counts, of all outcomes that are at most as probable as the given one.
    """
    (count, runs), (other, others) = first, second
    total = count + other
    ways = [math.comb(runs, k) * math.comb(others, total - k) for k in range(total + 1)]
    return sum(way for way in ways if way <= ways[count]) / math.comb(runs + others, total)


@dataclass(frozen=True)
class Row:
    """The runs of a row.

    Attributes:
        collapsed: number of runs that collapsed.
        pgd: accuracies under PGD, in %, of all runs that converged.
        diverged: number of runs that did not converge.
        collapse_p: probability of such a difference in collapses from the row "plain" by chance, by Fisher's test.
        pgd_p: the same for the accuracy under PGD and the best reference, by Welch's t-test; both are corrected by
            Holm's method, and None for references.
    """

    name: str
    collapsed: int
    pgd: tuple[float, ...]
    diverged: int
    collapse_p: float | None = None
    pgd_p: float | None = None

    @property
    def runs(self) -> int:
        return len(self.pgd)

    @property
    def standing(self) -> Standing:
        return Standing(self.name, "", self.pgd, self.diverged, 0.0, 0.0)

    @property
    def reference(self) -> bool:
        return self.name.startswith(REFERENCE)

    def __str__(self) -> str:
        return f'{self.collapsed} of {self.runs} of "{self.name}"'


@dataclass(frozen=True)
class CollapseCount:
    """The rows of the table, and the name of the reference with the highest accuracy under PGD."""

    rows: tuple[Row, ...]
    best: str

    def __str__(self) -> str:
        counts = f"Collapsed runs: {', '.join(str(row) for row in self.rows)}."
        return " ".join([counts, *(self._compared(row) for row in self.rows if not row.reference)])

    def _compared(self, row: Row) -> str:
        """Returns a sentence about a challenger: its collapses against "plain", its accuracy against the best."""
        plain, best = (next(one for one in self.rows if one.name == name) for name in (REFERENCE, self.best))
        counts = f'No significant difference in collapses between "{row.name}" and "{plain.name}"'
        if row.collapse_p is not None and row.collapse_p < SIGNIFICANT:
            word = "Fewer" if row.collapsed * plain.runs < plain.collapsed * row.runs else "More"
            counts = f'{word} collapses of "{row.name}" than of "{plain.name}"'
        means = f"{row.standing.mean:.2f} against {best.standing.mean:.2f} %"
        chance = f"(Fisher: p = {_shown(row.collapse_p)})"
        return f'{counts} {chance}; {PGD}, against "{best.name}": {means} (Welch: p = {_shown(row.pgd_p)}).'

    def to_json(self) -> dict[str, Any]:
        return {"best": self.best, "rows": [{**vars(row), "runs": row.runs} for row in self.rows]}


def _shown(p: float | None) -> str:
    return "unknown" if p is None else f"{p:.2g}"


def find_collapses(experiment: Experiment, statuses: Sequence[CellStatus]) -> CollapseCount | None:
    """Counts collapses; returns None for other experiments, and unless every run has been attacked."""
    if not experiment.collapses or any(one.state != "done" for one in statuses):
        return None
    rows = [_row(name, statuses) for name in dict.fromkeys(one.cell.row for one in statuses)]
    plain = next((row for row in rows if row.name == REFERENCE), None)
    known = [row for row in rows if row.reference and row.pgd]
    if plain is None or not all(row.pgd for row in rows):
        return None
    best = max(known, key=lambda row: row.standing.mean)
    others = [row for row in rows if not row.reference]
    by_count = holm([fisher_p((row.collapsed, row.runs), (plain.collapsed, plain.runs)) for row in others], len(others))
    by_mean = holm([welch_p(row.standing, best.standing) for row in others], len(others))
    found = {row.name: row for row in rows}
    for row, count_p, mean_p in zip(others, by_count, by_mean, strict=True):
        found[row.name] = dataclasses.replace(row, collapse_p=count_p, pgd_p=mean_p)
    return CollapseCount(tuple(found.values()), best.name)


def _row(name: str, statuses: Sequence[CellStatus]) -> Row:
    """Returns a row; both columns have the same runs in the same order."""
    fgsm, pgd = (next(one for one in statuses if (one.cell.row, one.cell.column) == (name, c)) for c in (FGSM, PGD))
    count = sum(collapsed(*pair) for pair in zip(fgsm.values, pgd.values, strict=True))
    return Row(name, count, pgd.values, pgd.diverged)
