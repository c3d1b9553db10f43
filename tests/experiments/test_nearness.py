"""How many cells are near the paper: counted by hand."""

import dataclasses

import pytest
from fake_records import small

from dcnet.experiments import Cell, CellStatus, Experiment
from dcnet.experiments.nearness import nearness_of


def status(row: str, paper: float | str | None, *ours: float, diverged: int = 0) -> CellStatus:
    return CellStatus(Cell(row, "cos", small(), paper), ours, diverged, 1)


def nearness(*found: CellStatus, higher_is_better: bool = False):
    cells = tuple(one.cell for one in found)
    return nearness_of(Experiment("some", "some", cells, higher_is_better=higher_is_better), found)


def test_who_is_worse_by_more_than_a_point_is_named():
    told = nearness(
        status("a", 20.0, 21.0), status("b", 20.0, 21.01), status("c", 20.0, 3.0), status("d", 20.0, 19.0, 24.0)
    )
    assert told is not None
    assert (told.cells, told.behind) == (4, (("b", "cos", 1.01), ("d", "cos", 1.5)))
    assert told.sentence == (
        "Of 4 cells to compare, 2 are within 1.00 of the paper or better; not b in cos (+1.01); d in cos (+1.50)."
    )
    assert told.described() == {"within": 1.0, "cells": 4, "behind": [["b", "cos", 1.01], ["d", "cos", 1.5]]}


def test_where_higher_is_better_lower_is_behind():
    told = nearness(status("a", 20.0, 25.0), status("b", 20.0, 18.0), higher_is_better=True)
    assert told is not None
    assert told.behind == (("b", "cos", -2.0),)


def test_what_did_not_converge_is_behind_a_number_and_a_number_is_not_behind_that():
    told = nearness(status("a", 20.0, diverged=1), status("b", "N/C", 90.0), status("c", "N/C", diverged=1))
    assert told is not None
    assert str(told) == "of 3 cells to compare, 2 are within 1.00 of the paper or better; not a in cos (N/C)"


def test_what_has_nothing_on_either_side_does_not_count():
    left_out = (status("a", None, 90.0), status("b", 20.0))
    assert nearness(*left_out) is None
    assert (
        str(nearness(*left_out, status("c", 20.0, 20.0)))
        == "of 1 cell to compare, 1 is within 1.00 of the paper or better"
    )


@pytest.mark.parametrize(("count", "named"), [(0, False), (3, True), (4, False)])
def test_a_few_are_named_and_many_are_counted(count, named):
    far = [dataclasses.replace(status(f"row {number}", 20.0), values=(30.0,)) for number in range(count)]
    told = str(nearness(status("near", 20.0, 20.0), *far))
    assert told.startswith(f"of {count + 1} cell{'s' if count else ''} to compare, 1 is within 1.00")
    assert ("; not row 0 in cos (+10.00); row 1" in told) == named
