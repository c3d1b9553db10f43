"""Which row of a contest is the best, as far as chance lets one tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.experiment import Experiment
from dcnet.experiments.finding import Finding
from dcnet.experiments.status import DIGITS, CellStatus, pooled_deviation

# Student's t: what chance exceeds in one case of twenty, by degrees of freedom from 1 on. Where there are more, that of
# the last is a little on the safe side.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Winner(Finding):
    """The best row and the one behind it.

    Attributes:
        best: its name.
        rival: the name of the next.
        by: how far the means are apart, as tables show them.
        chance: how far those of the same network seldom are, by the deviations of both.
    """

    best: str
    rival: str
    by: float
    chance: float

    @property
    def wins(self) -> bool:
        return self.by > self.chance

    def described(self) -> dict[str, Any]:
        return {"best": self.best, "rival": self.rival, "by": self.by, "chance": self.chance, "wins": self.wins}

    def __str__(self) -> str:
        # In quotes, since names of rows have commas.
        ahead = f'"{self.best}" is ahead of "{self.rival}" by {self.by:.2f}'
        if self.wins:
            return f"{ahead}, and wins: chance alone seldom gives more than {self.chance:.2f}"
        return f"{ahead}, and nobody wins: chance alone gives up to {self.chance:.2f}"


def winner_of(experiment: Experiment, found: Sequence[CellStatus]) -> Winner | None:
    """Of a contest; None of any other table, and where not all cells have several runs, all of which converged."""
    if not experiment.contest or len(found) < 2 or any(one.deviation is None or one.diverged for one in found):
        return None
    best, rival = sorted(found, key=_mean, reverse=experiment.higher_is_better)[:2]
    by = round(abs(round(_mean(best), DIGITS) - round(_mean(rival), DIGITS)), DIGITS)
    return Winner(best.cell.row, rival.cell.row, by, _chance(best, rival))


def _mean(status: CellStatus) -> float:
    return status.mean or 0.0


def _chance(one: CellStatus, other: CellStatus) -> float:
    """How far the means of two such sets of runs of the same network seldom are apart."""
    first, second = len(one.values), len(other.values)
    student = STUDENT[min(first + second - 2, len(STUDENT)) - 1]
    return student * (pooled_deviation((one, other)) or 0.0) * math.sqrt(1 / first + 1 / second)
