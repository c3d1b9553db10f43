"""Whether our rows come in the paper's order: pairs counted by hand."""

import math

import pytest
from fake_records import small

from dcnet.experiments import Cell, CellStatus, Experiment
from dcnet.experiments.order import order_of


def column(name: str, rows: dict[str, tuple[float | str | None, tuple[float, ...]]]) -> list[CellStatus]:
    """Cells of one column: the paper's number, and ours."""
    return [CellStatus(Cell(row, name, small(), paper), ours, 0, 1) for row, (paper, ours) in rows.items()]


def order(*found: CellStatus):
    return order_of(Experiment("some", "some", tuple(status.cell for status in found)), found)


def test_pairs_of_a_column_beyond_chance_are_counted():
    """Seeds at 1 and 2 deviate by 0.707, so that two runs seldom are more than 2 apart."""
    found = [
        *column("cos", {"a": (10.0, (1.0, 2.0)), "b": (12.5, (5.0,)), "c": (13.0, (4.0,)), "d": (20.0, (3.0,))}),
        *column("sqcos", {"a": (1.0, (9.0,)), "b": (4.0, (8.0,))}),
    ]
    told = order(*found)
    assert told is not None
    assert told.apart == pytest.approx(2.0)
    # a-b, a-c, a-d, b-d and c-d of the first, and a-b of the second; b and c are too near each other in the paper.
    assert told.pairs == 6
    assert told.turned == (("cos", "b", "d"), ("cos", "c", "d"), ("sqcos", "a", "b"))
    assert told.sentence.startswith("Of 6 pairs of a column that the paper has more than 2.00 apart")
    assert told.sentence.endswith("3 come in its order; not b and d in cos; c and d in cos; a and b in sqcos.")
    assert told.described() == {"apart": told.apart, "pairs": 6, "turned": [list(pair) for pair in told.turned]}


def test_what_has_no_number_on_either_side_is_not_compared():
    rows = {"a": (10.0, (1.0, 2.0)), "b": ("N/C", (5.0,)), "c": (20.0, ()), "d": (None, (3.0,)), "e": (20.0, (1.5,))}
    told = order(*column("cos", rows))
    assert told is not None
    # Equal numbers have no order.
    assert (told.pairs, told.turned) == (1, (("cos", "a", "e"),))


def test_the_deviation_is_that_of_all_cells_by_their_seeds():
    """Sums of squares 0.5 with one degree of freedom, and 8 with two."""
    told = order(*column("cos", {"a": (0.0, (1.0, 2.0)), "b": (90.0, (4.0, 6.0, 8.0)), "c": (50.0, (5.0,))}))
    assert told is not None
    assert told.apart == pytest.approx(2 * math.sqrt(2) * math.sqrt(8.5 / 3))


def test_without_a_deviation_or_a_pair_nothing_is_said():
    assert order(*column("cos", {"a": (1.0, (1.0,)), "b": (9.0, (2.0,))})) is None
    assert order(*column("cos", {"a": (1.0, (1.0, 5.0)), "b": (2.0, (2.0,))})) is None
    other = CellStatus(Cell("a", "cos", small(), 1.0, metric=("evaluations", "attacks")), (1.0, 1.1), 0, 1)
    assert order(other, *column("cos", {"b": (9.0, (2.0,))})) is None
