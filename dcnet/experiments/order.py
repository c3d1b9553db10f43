"""Whether the rows of a table come in the order that the paper has them in, as far as chance lets one tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from dcnet.experiments.experiment import ERROR, Experiment
from dcnet.experiments.finding import Finding
from dcnet.experiments.status import CellStatus, pooled_deviation

# Of the deviation of one run: two runs of the same network are further apart in one case of twenty.
CHANCE = 2 * math.sqrt(2)


@dataclass(frozen=True)
class Order(Finding):
    """The pairs of cells of one column that the paper has further apart than chance puts two runs.

    Attributes:
        apart: how far that is, by the deviation over the seeds of those cells of ours that have several.
        pairs: how many there are that we have numbers of.
        turned: those of them that come in the other order here, by column and both rows.
    """

    apart: float
    pairs: int
    turned: tuple[tuple[str, str, str], ...]

    def described(self) -> dict[str, Any]:
        return {"apart": self.apart, "pairs": self.pairs, "turned": [list(pair) for pair in self.turned]}

    def __str__(self) -> str:
        same, noun = self.pairs - len(self.turned), "pair" if self.pairs == 1 else "pairs"
        seen = f"{noun} of a column that the paper has more than {self.apart:.2f} apart, as chance seldom puts two runs"
        text = f"of {self.pairs} {seen}, {same} {'comes' if same == 1 else 'come'} in its order"
        others = [f"{first} and {second} in {column}" for column, first, second in self.turned]
        return f"{text}; not {'; '.join(others)}" if others else text


def order_of(experiment: Experiment, found: Sequence[CellStatus]) -> Order | None:
    """Of a table of test errors; None where there is no deviation to know chance by, or no such pair."""
    spread = pooled_deviation(found)
    if spread is None or any(status.cell.metric != ERROR for status in found):
        return None
    apart, pairs = CHANCE * spread, list[tuple[CellStatus, CellStatus]]()
    compared = sorted((one for one in found if one.difference is not None), key=lambda one: one.cell.column)
    for _, column in groupby(compared, key=lambda one: one.cell.column):
        pairs += [pair for pair in combinations(column, 2) if abs(_paper(*pair)) > apart]
    turned = tuple(
        (one.cell.column, one.cell.row, other.cell.row)
        for one, other in pairs
        if _paper(one, other) * ((one.mean or 0.0) - (other.mean or 0.0)) <= 0
    )
    return Order(apart, len(pairs), turned) if pairs else None


def _paper(one: CellStatus, other: CellStatus) -> float:
    """By how much the paper has one above the other."""
    return float(one.cell.paper or 0.0) - float(other.cell.paper or 0.0)
