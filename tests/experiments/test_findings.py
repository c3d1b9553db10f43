"""Findings of tables: counted by hand, and the winner against scipy's t test."""

import dataclasses
import json
import math

import pytest
from helpers.fake_records import bring, small
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dcnet.cli.app import main
from dcnet.experiments import Cell, CellStatus, Experiment, get_experiment
from dcnet.experiments.findings import STUDENT, find_closeness, find_nearest, find_order, find_winner, findings_of
from dcnet.experiments.reproduction import smoke_test

# --- closeness to the paper ---


def status(row: str, paper: float | str | None, *ours: float, diverged: int = 0) -> CellStatus:
    return CellStatus(Cell(row, "cos", small(), paper), ours, diverged, 1)


def closeness(*statuses: CellStatus, higher_is_better: bool = False):
    cells = tuple(one.cell for one in statuses)
    return find_closeness(Experiment("some", "some", cells, higher_is_better=higher_is_better), statuses)


def test_cells_that_differ_by_more_than_a_point_are_named():
    found = closeness(
        status("a", 20.0, 21.0),
        status("b", 20.0, 21.01),
        status("c", 20.0, 3.0),
        status("d", 20.0, 19.0, 24.0),
        status("e", 20.0, 19.0),
        status("f", 20.0, 18.99),
    )
    assert found is not None
    assert (found.cells, found.near) == (6, 2)
    assert found.worse == (("b", "cos", 1.01), ("d", "cos", 1.5))
    assert found.better == (("c", "cos", -17.0), ("f", "cos", -1.01))
    assert str(found) == (
        "2 of 6 compared cells are within 1.00 of the paper; 2 are better by more: c in cos (-17.00), f in cos (-1.01)"
        "; 2 are worse by more: b in cos (+1.01), d in cos (+1.50)."
    )
    assert found.to_json() == {
        "within": 1.0,
        "cells": 6,
        "near": 2,
        "better": [["c", "cos", -17.0], ["f", "cos", -1.01]],
        "worse": [["b", "cos", 1.01], ["d", "cos", 1.5]],
    }


def test_lower_numbers_are_worse_if_higher_is_better():
    found = closeness(status("a", 20.0, 25.0), status("b", 20.0, 18.0), higher_is_better=True)
    assert found is not None
    assert found.worse == (("b", "cos", -2.0),)
    assert found.better == (("a", "cos", 5.0),)


def test_cells_that_converge_on_one_side_only_are_apart():
    found = closeness(status("a", 20.0, diverged=1), status("b", "N/C", 90.0), status("c", "N/C", diverged=1))
    assert str(found) == (
        "1 of 3 compared cells is within 1.00 of the paper; 1 is better by more: b in cos (converges only here); "
        "1 is worse by more: a in cos (N/C)."
    )


def test_cells_without_a_number_on_one_side_do_not_count():
    left_out = (status("a", None, 90.0), status("b", 20.0))
    assert closeness(*left_out) is None
    found = closeness(*left_out, status("c", 20.0, 20.0))
    assert str(found) == "1 of 1 compared cells is within 1.00 of the paper."


@pytest.mark.parametrize("how", ["better", "worse"])
@pytest.mark.parametrize(("count", "named"), [(3, True), (4, False)])
def test_a_few_cells_are_named_and_many_are_counted(count, named, how):
    far = [dataclasses.replace(status(f"row {number}", 20.0), values=(30.0,)) for number in range(count)]
    text = str(closeness(status("near", 20.0, 20.0), *far, higher_is_better=how == "better"))
    assert text.startswith(f"1 of {count + 1} compared cells is within 1.00 of the paper; {count} are {how} by more")
    assert (": row 0 in cos (+10.00), row 1" in text) == named


# --- order of the rows ---


def column(name: str, rows: dict[str, tuple[float | str | None, tuple[float, ...]]]) -> list[CellStatus]:
    """Cells of one column: the paper's number, and ours."""
    return [CellStatus(Cell(row, name, small(), paper), ours, 0, 1) for row, (paper, ours) in rows.items()]


def order(*statuses: CellStatus):
    return find_order(Experiment("some", "some", tuple(status.cell for status in statuses)), statuses)


def test_pairs_of_a_column_beyond_seed_noise_are_counted():
    """Seeds at 1 and 2 deviate by 0.707, so that seed noise is 2."""
    statuses = [
        *column("cos", {"a": (10.0, (1.0, 2.0)), "b": (12.5, (5.0,)), "c": (13.0, (4.0,)), "d": (20.0, (3.0,))}),
        *column("sqcos", {"a": (1.0, (9.0,)), "b": (4.0, (8.0,))}),
    ]
    found = order(*statuses)
    assert found is not None
    assert found.apart == pytest.approx(2.0)
    # a-b, a-c, a-d, b-d and c-d of the first, and a-b of the second; b and c are too close in the paper.
    assert found.pairs == 6
    assert found.turned == (("cos", "b", "d"), ("cos", "c", "d"), ("sqcos", "a", "b"))
    assert str(found) == (
        "3 of the 6 pairs that differ by more than seed noise (2.00) rank as in the paper; not b and d in cos; "
        "c and d in cos; a and b in sqcos."
    )
    assert found.to_json() == {"apart": found.apart, "pairs": 6, "turned": [list(pair) for pair in found.turned]}


def test_pairs_without_a_number_on_one_side_are_not_compared():
    rows = {"a": (10.0, (1.0, 2.0)), "b": ("N/C", (5.0,)), "c": (20.0, ()), "d": (None, (3.0,)), "e": (20.0, (1.5,))}
    found = order(*column("cos", rows))
    assert found is not None
    # Equal numbers have no order.
    assert (found.pairs, found.turned) == (1, (("cos", "a", "e"),))
    assert str(found).startswith("0 of 1 pair that differs by more than seed noise (2.00) rank as in the paper; not")


def test_seed_noise_is_pooled_over_all_cells():
    """Sums of squares 0.5 with one degree of freedom, and 8 with two."""
    found = order(*column("cos", {"a": (0.0, (1.0, 2.0)), "b": (90.0, (4.0, 6.0, 8.0)), "c": (50.0, (5.0,))}))
    assert found is not None
    assert found.apart == pytest.approx(2 * math.sqrt(2) * math.sqrt(8.5 / 3))


def test_the_order_requires_seed_noise_and_a_pair():
    assert order(*column("cos", {"a": (1.0, (1.0,)), "b": (9.0, (2.0,))})) is None
    assert order(*column("cos", {"a": (1.0, (1.0, 5.0)), "b": (2.0, (2.0,))})) is None
    other = CellStatus(Cell("a", "cos", small(), 1.0, metric=("evaluations", "attacks")), (1.0, 1.1), 0, 1)
    assert order(other, *column("cos", {"b": (9.0, (2.0,))})) is None


# --- the result of a hunt ---


def hunt(rows: dict[str, tuple[tuple[str, float | None, float | None], ...]], **about):
    """Rows with (column, the paper's number, ours) each."""
    statuses = [
        CellStatus(Cell(row, column, small(), paper), () if ours is None else (ours,), 0, 1)
        for row, cells in rows.items()
        for column, paper, ours in cells
    ]
    experiment = Experiment("some", "some", tuple(one.cell for one in statuses), **{"hunt": True, **about})
    return find_nearest(experiment, statuses)


HUNT = {
    "first: clean": (("a", 80.0, 90.0), ("b", 90.0, 91.0)),
    "first: FGSM": (("a", 20.0, 10.0), ("b", 50.0, 20.0)),
    # Only in one column: the other has the differences 10 of the first setting.
    "next: clean": (("b", 90.0, 93.0),),
    "next: FGSM": (("b", 50.0, 44.0),),
    "next: source": (("a", None, 50.0),),
    "missing: clean": (("a", 80.0, 80.0), ("b", 90.0, 90.0)),
    "missing: FGSM": (("a", 20.0, 20.0), ("b", 50.0, None)),
}


def test_the_nearest_setting_by_measure():
    found = hunt(HUNT)
    assert found is not None
    assert found.settings == 2
    expected = {"all measures": ("next", 29 / 4), "clean": ("first", 5.5), "FGSM": ("next", 8.0)}
    assert found.by_measure == {name: (best, pytest.approx(gap)) for name, (best, gap) in expected.items()}
    assert str(found) == (
        'Of 2 complete settings, nearest to the paper, by mean difference: "next" in all measures (7.25), "first" in '
        'clean (5.50), "next" in FGSM (8.00).'
    )
    assert found.to_json()["by_measure"]["clean"] == ["first", 5.5]


def test_a_hunt_needs_two_complete_settings():
    assert hunt(HUNT, hunt=False) is None
    assert hunt({name: cells for name, cells in HUNT.items() if not name.startswith("next")}) is None
    assert hunt({**HUNT, "first: FGSM": (("a", 20.0, None), ("b", 50.0, 20.0))}) is None


# --- the winner of a contest ---


def contest(rows: dict[str, tuple[float, ...]], diverged: int = 0, **about):
    statuses = [CellStatus(Cell(row, "error", small()), values, 0, 3) for row, values in rows.items()]
    statuses[-1] = CellStatus(statuses[-1].cell, statuses[-1].values, diverged, 3)
    experiment = Experiment("some", "some", tuple(one.cell for one in statuses), **{"contest": True, **about})
    return find_winner(experiment, statuses)


def test_the_best_is_named_with_the_second_and_the_seed_noise():
    """Deviations of 1 and 2: pooled variance 10 / 4, factor 2 / 3 for three runs each, four degrees of freedom."""
    found = contest({"last": (80.0, 90.0), "next, ReLU": (18.0, 20.0, 22.0), "best": (11.0, 10.0, 12.0)})
    assert found is not None
    assert (found.best, found.rival, found.by, found.wins) == ("best", "next, ReLU", 9.0, True)
    assert found.chance == pytest.approx(2.78 * (10 / 4 * 2 / 3) ** 0.5)
    assert str(found) == '"best" is ahead of "next, ReLU" by 9.00 and wins: seed noise is 3.59.'
    assert found.to_json() == {
        "best": "best",
        "rival": "next, ReLU",
        "by": 9.0,
        "chance": found.chance,
        "wins": True,
    }


def test_the_highest_number_wins_if_higher_is_better():
    found = contest({"low": (1.0, 1.1), "high": (9.0, 9.1), "middle": (5.0, 5.1)}, higher_is_better=True)
    assert found is not None
    assert (found.best, found.rival) == ("high", "middle")


def test_a_difference_within_seed_noise_has_no_winner():
    found = contest({"a": (10.0, 12.0), "b": (11.0, 14.0)})
    assert found is not None
    assert str(found).startswith('"a" is ahead of "b" by 1.50, within seed noise (')
    assert str(found).endswith("): no winner.")
    assert not found.to_json()["wins"]


def test_the_difference_is_computed_from_rounded_means():
    """10.004 and 10.006 are shown as 10.00 and 10.01."""
    found = contest({"a": (10.003, 10.005), "b": (10.005, 10.007)})
    assert found is not None
    assert found.by == 0.01


def test_the_last_critical_value_is_used_for_more_degrees_of_freedom():
    found = contest({"a": (10.0, 12.0) * 4, "b": (20.0, 22.0) * 4})
    assert found is not None
    assert found.chance == pytest.approx(2.23 * (8 / 7 * 2 / 8) ** 0.5)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ({"a": (1.0, 2.0), "b": (5.0, 6.0)}, {"contest": False}),
        ({"a": (1.0, 2.0)}, {}),
        ({"a": (1.0, 2.0), "b": (5.0,)}, {}),
        ({"a": (1.0, 2.0), "b": ()}, {}),
        ({"a": (1.0, 2.0), "b": (5.0, 6.0)}, {"diverged": 1}),
    ],
)
def test_a_winner_requires_several_rows_with_several_runs_each(rows, more):
    assert contest(rows, **more) is None


runs = st.lists(st.integers(0, 10_000).map(lambda value: value / 100), min_size=2, max_size=6, unique=True)


@given(runs, runs)
def test_a_win_is_significant_by_the_t_test_at_5_percent(one, other):
    found = contest({"a": tuple(one), "b": tuple(other)})
    assert found is not None
    # Means and t are rounded to two digits.
    if abs(found.by - found.chance) > 0.01 + 0.003 * found.chance:
        assert found.wins == (stats.ttest_ind(one, other).pvalue < 0.05)


def test_critical_values_match_scipy():
    assert pytest.approx([stats.t.ppf(0.975, free) for free in range(1, len(STUDENT) + 1)], abs=0.005) == [*STUDENT]


def test_reproduce_prints_the_winner(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cell, errors in zip(get_experiment("fair").cells, ((24.0, 24.1, 24.2), (23.0, 23.1, 23.2)), strict=True):
        for config, error in zip(cell.configs(3), errors, strict=True):
            bring(tmp_path / "brought", config, error)
    words = ["reproduce", "fair", "--status", "--runs", str(tmp_path), "--records", str(tmp_path / "brought")]
    assert main(words) == 0
    assert 'fair: "seg-sqcos, no ReLU" is ahead of "plain, ReLU" by 1.00 and wins' in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fair"]["winner"]["wins"]


def test_a_smoke_test_has_no_findings():
    experiment = smoke_test(get_experiment("fair"))
    statuses = [CellStatus(cell, (1.0 + place, 1.1 + place), 0, 1) for place, cell in enumerate(experiment.cells)]
    assert findings_of(experiment, statuses) == {}
