"""Who wins a contest: by hand, and by scipy's t test of two samples, which is the same one."""

import json

import pytest
from fake_records import bring, small
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dcnet.cli.app import main
from dcnet.experiments import Cell, CellStatus, Experiment, chosen
from dcnet.experiments.findings import told_of
from dcnet.experiments.smoke import in_small
from dcnet.experiments.winner import STUDENT, winner_of


def contest(rows: dict[str, tuple[float, ...]], diverged: int = 0, **about):
    found = [CellStatus(Cell(row, "error", small()), values, 0, 3) for row, values in rows.items()]
    found[-1] = CellStatus(found[-1].cell, found[-1].values, diverged, 3)
    experiment = Experiment("some", "some", tuple(one.cell for one in found), **{"contest": True, **about})
    return winner_of(experiment, found)


def test_the_best_is_named_with_the_next_and_how_far_chance_goes():
    """Deviations of 1 and 2: 10 / 4 for their mean square, 2 / 3 for three runs each, four degrees of freedom."""
    told = contest({"last": (80.0, 90.0), "next, ReLU": (18.0, 20.0, 22.0), "best": (11.0, 10.0, 12.0)})
    assert told is not None
    assert (told.best, told.rival, told.by, told.wins) == ("best", "next, ReLU", 9.0, True)
    assert told.chance == pytest.approx(2.78 * (10 / 4 * 2 / 3) ** 0.5)
    assert (
        told.sentence == '"best" is ahead of "next, ReLU" by 9.00, and wins: chance alone seldom gives more than 3.59.'
    )
    assert told.described() == {
        "best": "best",
        "rival": "next, ReLU",
        "by": 9.0,
        "chance": told.chance,
        "wins": True,
    }


def test_where_higher_is_better_the_highest_wins():
    told = contest({"low": (1.0, 1.1), "high": (9.0, 9.1), "middle": (5.0, 5.1)}, higher_is_better=True)
    assert told is not None
    assert (told.best, told.rival) == ("high", "middle")


def test_within_chance_nobody_wins():
    told = contest({"a": (10.0, 12.0), "b": (11.0, 14.0)})
    assert told is not None
    assert str(told).startswith('"a" is ahead of "b" by 1.50, and nobody wins: chance alone gives up to ')
    assert not told.described()["wins"]


def test_the_difference_is_that_of_the_numbers_that_are_shown():
    """10.004 and 10.006 are shown as 10.00 and 10.01."""
    told = contest({"a": (10.003, 10.005), "b": (10.005, 10.007)})
    assert told is not None
    assert told.by == 0.01


def test_with_more_runs_than_the_table_goes_its_last_number_holds():
    told = contest({"a": (10.0, 12.0) * 4, "b": (20.0, 22.0) * 4})
    assert told is not None
    assert told.chance == pytest.approx(2.23 * (8 / 7 * 2 / 8) ** 0.5)


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
def test_without_rivals_or_several_runs_of_each_nothing_is_said(rows, more):
    assert contest(rows, **more) is None


runs = st.lists(st.integers(0, 10_000).map(lambda value: value / 100), min_size=2, max_size=6, unique=True)


@given(runs, runs)
def test_it_wins_where_the_t_test_says_one_in_twenty(one, other):
    told = contest({"a": tuple(one), "b": tuple(other)})
    assert told is not None
    # Means and t are rounded to two digits.
    if abs(told.by - told.chance) > 0.01 + 0.003 * told.chance:
        assert told.wins == (stats.ttest_ind(one, other).pvalue < 0.05)


def test_the_table_of_t_is_students():
    assert pytest.approx([stats.t.ppf(0.975, free) for free in range(1, len(STUDENT) + 1)], abs=0.005) == [*STUDENT]


def test_who_wins_is_told_to_people_and_machines_and_not_in_small(tmp_path, capsys):
    for cell, errors in zip(chosen(["fair"])[0].cells, ((24.0, 24.1, 24.2), (23.0, 23.1, 23.2)), strict=True):
        for config, error in zip(cell.configs(3), errors, strict=True):
            bring(tmp_path / "brought", config, error)
    words = ["reproduce", "fair", "--status", "--runs", str(tmp_path), "--records", str(tmp_path / "brought")]
    assert main(words) == 0
    assert 'fair: "seg-sqcos, no ReLU" is ahead of "plain, ReLU" by 1.00, and wins' in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fair"]["winner"]["wins"]


def test_two_steps_on_the_digits_decide_no_contest():
    experiment = in_small(chosen(["fair"])[0])
    found = [CellStatus(cell, (1.0 + place, 1.1 + place), 0, 1) for place, cell in enumerate(experiment.cells)]
    assert told_of(experiment, found) == []
