"""Contests: stages from records, choices in plain loops, edges of ranges, the t test against scipy, and whole runs."""

import dataclasses
import io
import json
import statistics

import pytest
from helpers.fake_records import bring, small
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from dcnet.cli.app import main
from dcnet.experiments import experiments
from dcnet.experiments.contest import (
    HELD_OUT,
    TEST,
    TRIAL_SEEDS,
    Candidate,
    Contest,
    Measure,
    Side,
    contest_experiment,
)
from dcnet.experiments.contest_result import NO_VERDICT, ContestState, Standing, find_contest, holm, welch_p
from dcnet.experiments.reproduction import Reproduction
from dcnet.experiments.status import RecordIndex, plan_tasks, status_of
from dcnet.report.experiment_tables import contest_table, docs_table, experiment_tables
from dcnet.report.page import paper_sections
from dcnet.report.page.page_sources import Sources
from dcnet.training import Execution

RATES, DECAYS = (0.01, 0.02, 0.04), (0.0, 0.1)
TRIAL_STEPS, STEPS = 2, 4


def side(operator: str, reference: bool = False) -> Side:
    recipes = [
        Candidate("Adam", small(operator, lr=lr, weight_decay=decay, steps=STEPS)) for lr in RATES for decay in DECAYS
    ]
    other = Candidate("SGD", small(operator, lr=1.0, optimizer="sgd", steps=STEPS))
    return Side(operator, (*recipes, other), reference)


def small_contest(finalists: int = 2):
    rules = Contest((side("conv", True), side("tanh-cos")), {"steps": TRIAL_STEPS}, finalists)
    return contest_experiment("contest_small", "Digits, error in %", rules, seeds=2)


class Notebook:
    """Records by config, as `RecordIndex.record` finds them, written by hand."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, config, error, **more):
        bring(self.folder, config, error, **more)

    @property
    def index(self):
        self.folder.mkdir(exist_ok=True)
        return RecordIndex(self.folder / "runs", [self.folder])

    def experiment(self, contest):
        return contest.at(self.index.record)

    def state(self, contest, seeds=None):
        index = self.index
        grown = contest.at(index.record)
        return find_contest(grown, status_of(grown, index, seeds))


@pytest.fixture
def notebook(tmp_path):
    return Notebook(tmp_path / "records")


def error_of(operator: str, lr: float, decay: float, seed: int) -> float:
    """The middle rate is best; the seeds disagree about the decay: the first prefers 0.1, the second 0 by far."""
    base = 20.0 if operator == "conv" else 19.0
    first = 0.2 if decay == 0 else 0.0
    return base + 100 * abs(lr - 0.02) + (first if seed == 0 else 3 * (decay > 0))


def fill_stage(notebook, contest):
    """Writes the records of all runs that are missing now; returns how many."""
    tasks = plan_tasks([notebook.experiment(contest)], notebook.index)
    for task in tasks:
        config = task.config
        error = error_of(config.operator, config.lr, config.weight_decay, config.seed)
        seconds = (100.0 if config.operator == "conv" else 150.0) * (config.steps / STEPS)
        notebook.write(config, error + 0.01 * config.seed, timings={"training": seconds})
    return len(tasks)


# --- stages ---


def test_stages_open_one_after_another(notebook):
    contest = small_contest()
    assert notebook.state(contest).missing == (14, 4, 4)
    assert str(notebook.state(contest)) == (
        "Stage 1 of 3 (trials) is open; missing runs: 14 trials, 4 second seeds, 4 finals."
    )
    assert fill_stage(notebook, contest) == 14
    assert notebook.state(contest).missing == (0, 4, 4)
    assert str(notebook.state(contest)).startswith("Stage 2 of 3 (second seeds) is open; missing runs: 4 second")
    assert fill_stage(notebook, contest) == 4
    assert notebook.state(contest).missing == (0, 0, 4)
    assert notebook.state(contest, seeds=5).missing == (0, 0, 10)
    assert fill_stage(notebook, contest) == 4
    assert notebook.state(contest).missing == (0, 0, 0)
    assert fill_stage(notebook, contest) == 0


def test_finalists_and_the_best_match_plain_loops(notebook):
    """The first seed prefers a decay of 0.1, and the mean over both seeds one of 0."""
    contest = small_contest()
    for _ in range(2):
        fill_stage(notebook, contest)
    grown = notebook.experiment(contest)
    for name in ("conv", "tanh-cos"):
        cells = [cell for cell in grown.cells if cell.row.startswith(f"{name}: ")]
        trials = [cell for cell in cells if cell.column == HELD_OUT]
        assert {cell.config.steps for cell in trials} == {TRIAL_STEPS}

        def errors(cell, seeds):
            config = cell.config
            return statistics.fmean(
                error_of(config.operator, config.lr, config.weight_decay, seed) + 0.01 * seed for seed in range(seeds)
            )

        finalists = sorted(trials, key=lambda cell: errors(cell, 1))[:2]
        assert [cell.seeds for cell in trials] == [2 if cell in finalists else 1 for cell in trials]
        best = min(finalists, key=lambda cell: errors(cell, 2))
        assert best.row == f"{name}: Adam 0.02, decay 0"
        (final,) = [cell for cell in cells if cell.column == TEST]
        assert final.row == best.row
        assert final.config == dataclasses.replace(best.config, steps=STEPS)


def test_a_side_goes_on_without_the_others(notebook):
    contest = small_contest()
    for task in plan_tasks([contest], notebook.index):
        if task.config.operator == "conv":
            notebook.write(task.config, 20.0)
    tasks = plan_tasks([notebook.experiment(contest)], notebook.index)
    assert sorted({(task.config.operator, task.config.seed) for task in tasks}) == [("conv", 1), ("tanh-cos", 0)]
    assert len(plan_tasks([notebook.experiment(contest.only(["conv"]))], notebook.index)) == 2


def test_equal_errors_keep_the_order_of_the_recipes(notebook):
    contest = small_contest()
    for _ in range(2):
        for task in plan_tasks([notebook.experiment(contest)], notebook.index):
            notebook.write(task.config, 20.0)
    finals = [cell.row for cell in notebook.experiment(contest).cells if cell.column == TEST]
    assert finals == ["conv: Adam 0.01, decay 0", "tanh-cos: Adam 0.01, decay 0"]


def test_a_run_that_diverged_is_the_worst(notebook):
    contest = small_contest()
    for task in plan_tasks([contest], notebook.index):
        status = "done" if task.config.lr == 0.04 else "diverged"
        # A run that diverged keeps the results of its last evaluation.
        error = 99.0 if status == "done" else 1.0
        notebook.write(task.config, error, status=status, results={"test_error": error})
    seconds = [cell.row for cell in notebook.experiment(contest).cells if cell.seeds == 2]
    assert [row.partition(": ")[2] for row in seconds] == 2 * ["Adam 0.04, decay 0", "Adam 0.04, decay 0.1"]


def test_more_seeds_than_planned_change_no_choice(notebook):
    contest = small_contest()
    fill_stage(notebook, contest)
    before = notebook.experiment(contest).cells
    for cell in before:
        for config in dataclasses.replace(cell, seeds=None).configs(9)[2:]:
            notebook.write(config, 0.0)
    grown = notebook.experiment(contest)
    assert grown.cells == before
    assert all(0.0 not in one.values for one in status_of(grown, notebook.index))
    fill_stage(notebook, contest)
    assert [cell.row for cell in notebook.experiment(contest).cells if cell.column == TEST] == [
        "conv: Adam 0.02, decay 0",
        "tanh-cos: Adam 0.02, decay 0",
    ]


def test_the_sides_need_the_same_number_of_recipes_and_a_reference():
    few = dataclasses.replace(side("tanh-cos"), candidates=side("tanh-cos").candidates[:3])
    with pytest.raises(ValueError, match=r"same number of recipes, but they have {'conv': 7, 'tanh-cos': 3}"):
        Contest((side("conv", True), few))
    with pytest.raises(ValueError, match=r"'some' needs two sides or more, and a reference"):
        contest_experiment("some", "some", Contest((side("conv"), side("tanh-cos"))))
    with pytest.raises(ValueError, match="the name of a side must not contain ': ', as 'conv: wide' does"):
        Contest((side("conv", True), dataclasses.replace(side("conv"), name="conv: wide")))
    twice = dataclasses.replace(side("conv"), candidates=2 * side("conv").candidates[:1])
    with pytest.raises(ValueError, match=r"the side 'conv' has the config of 'Adam 0.01, decay 0' twice"):
        Contest((twice,))
    with pytest.raises(ValueError, match="finalists must be 1 or more, not 0"):
        Contest((side("conv", True), side("tanh-cos")), finalists=0)


# --- edges ---


@pytest.mark.parametrize(
    ("lr", "decay", "found"),
    [
        (0.02, 0.0, []),
        (0.02, 0.1, ["decay"]),
        (0.01, 0.0, ["rate"]),
        (0.04, 0.1, ["rate", "decay"]),
    ],
)
def test_edges_of_a_range(lr, decay, found):
    """A decay of 0 has no smaller neighbor."""
    own = side("conv")
    (best,) = [one for one in own.candidates if (one.config.lr, one.config.weight_decay) == (lr, decay)]
    assert own.edges(best) == found


def test_ranges_belong_to_families_and_single_values_have_no_edge():
    recipes = [Candidate("Adam", small(lr=lr)) for lr in (0.01, 0.02, 0.04)]
    own = Side("tanh-cos", (*recipes, Candidate("SGD", small(lr=1.0, optimizer="sgd"))))
    assert [own.edges(one) for one in own.candidates] == [["rate"], [], ["rate"], []]


def test_edges_are_reported(notebook):
    contest = small_contest()
    for _ in range(3):
        for task in plan_tasks([notebook.experiment(contest)], notebook.index):
            error = 20.0 - 100 * task.config.lr if task.config.optimizer == "adam" else 50.0
            notebook.write(task.config, error, timings={"training": 1.0})
    state = notebook.state(contest)
    assert state.edges == (("conv: Adam 0.04, decay 0", "rate"), ("tanh-cos: Adam 0.04, decay 0", "rate"))
    assert str(state).endswith(
        " The best recipes of 2 sides are at the edge of their ranges, so extend: the rate of "
        '"Adam 0.04, decay 0" (2 sides).'
    )
    one = dataclasses.replace(state, edges=state.edges[1:])
    end = 'The rate of "tanh-cos: Adam 0.04, decay 0", the best recipe of its side, is at the edge of its range: '
    assert str(one).endswith(end + "extend it.")


def test_edges_are_grouped_by_recipe():
    """Also if a side has two of them."""
    edges = (("a: SGD 1, decay 0", "rate"), ("b: SGD 1, decay 0", "rate"), ("c: Adam 1, decay 1", "rate"))
    state = ContestState((1, 0, 0), (*edges, ("c: Adam 1, decay 1", "decay")), (), None)
    assert str(state).partition(" trials. ")[2] == (
        "The best recipes of 3 sides are at the edge of their ranges, so extend: "
        'the rate of "SGD 1, decay 0" (2 sides), the rate of "Adam 1, decay 1" (1 side), '
        'the decay of "Adam 1, decay 1" (1 side).'
    )


# --- more recipes for a contest with records ---


def with_a_higher_rate(contest):
    """The contest with one more recipe on each side."""
    sides = []
    for one in contest.rules.sides:
        config = small(one.candidates[0].config.operator, lr=0.08, steps=STEPS)
        sides.append(dataclasses.replace(one, candidates=(*one.candidates, Candidate("Adam", config))))
    rules = dataclasses.replace(contest.rules, sides=tuple(sides))
    return contest_experiment("contest_small", "Digits, error in %", rules, seeds=2)


def test_records_still_count_after_new_recipes(notebook):
    """Final runs and second seeds stay in the tables, and only the new trials are run, but there is no verdict."""
    contest = small_contest()
    for _ in range(3):
        fill_stage(notebook, contest)
    before = status_of(notebook.experiment(contest), notebook.index)
    larger = with_a_higher_rate(contest)
    after = status_of(notebook.experiment(larger), notebook.index)
    values = {(one.cell.row, one.cell.column): one.values for one in after}
    assert {place: found for place, found in values.items() if found} == {
        (one.cell.row, one.cell.column): one.values for one in before
    }
    state = notebook.state(larger)
    assert (state.missing, state.edges, state.standings) == ((2, 4, 4), (), ())
    assert {task.config.lr for task in plan_tasks([notebook.experiment(larger)], notebook.index)} == {0.08}
    assert fill_stage(notebook, larger) == 2
    # The new recipe is not among the best, so the result is the same as before.
    assert notebook.state(larger).missing == (0, 0, 0)
    assert notebook.state(larger).verdict == notebook.state(contest).verdict


def test_a_better_new_recipe_replaces_the_earlier_one(notebook):
    contest = small_contest()
    for _ in range(3):
        fill_stage(notebook, contest)
    larger = with_a_higher_rate(contest)
    for task in plan_tasks([notebook.experiment(larger)], notebook.index):
        notebook.write(task.config, 1.0)
    # The second seed of the new recipe is missing; the other finalist has one.
    assert notebook.state(larger).missing == (0, 2, 4)
    assert [cell.row for cell in notebook.experiment(larger).cells if cell.column == TEST] == [
        "conv: Adam 0.02, decay 0",
        "tanh-cos: Adam 0.02, decay 0",
    ]
    for task in plan_tasks([notebook.experiment(larger)], notebook.index):
        assert (task.config.lr, task.config.seed) == (0.08, 1)
        notebook.write(task.config, 1.0)
    finals = [cell for cell in notebook.experiment(larger).cells if cell.column == TEST]
    assert [cell.config.lr for cell in finals] == [0.08, 0.08]
    assert notebook.state(larger).missing == (0, 0, 4)
    assert [value for _, value in notebook.state(larger).edges] == ["rate", "rate"]


# --- the result ---


def standing(name: str, *errors: float, seconds: float = 100.0, diverged: int = 0) -> Standing:
    return Standing(name, "some", errors, diverged, seconds, 3 * seconds)


@given(
    first=st.lists(st.floats(10, 30), min_size=2, max_size=6),
    second=st.lists(st.floats(10, 30), min_size=2, max_size=6),
)
def test_welch_matches_scipy(first, second):
    if statistics.stdev(first) < 1e-3 or statistics.stdev(second) < 1e-3:
        return
    expected = stats.ttest_ind(first, second, equal_var=False).pvalue
    assert welch_p(standing("a", *first), standing("b", *second)) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_welch_without_deviation_or_with_too_few_runs():
    assert welch_p(standing("a", 20.0, 20.0), standing("b", 20.0, 20.0)) == 1.0
    # The sum of three times 20.1 is not exactly 60.3, but their deviation is 0.
    assert welch_p(standing("a", 20.1, 20.1, 20.1), standing("b", 21.7, 21.7, 21.7)) is None
    assert welch_p(standing("a", 20.1, 20.1, 20.1), standing("b", 21.7, 21.8, 21.7)) is not None
    assert welch_p(standing("a", 20.0), standing("b", 21.0, 22.0)) is None
    assert welch_p(standing("a", 20.0, 21.0, diverged=1), standing("b", 21.0, 22.0)) is None


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3, and 0.021 x 2, which is raised to the one before; a missing value counts as a test."""
    assert holm([0.021, 0.01, None, 0.02], 4) == pytest.approx([0.06, 0.04, None, 0.06])
    assert holm([0.021, 0.01, 0.02], 3) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.01], 5) == pytest.approx([0.05])
    assert holm([0.6, 0.5], 2) == [1.0, 1.0]
    assert holm([], 0) == []


def finals(notebook, contest, errors):
    """Writes all stages, with these test errors of the final runs by operator."""
    for _ in range(2):
        fill_stage(notebook, contest)
    for task in plan_tasks([notebook.experiment(contest)], notebook.index, len(errors["conv"])):
        seconds = 100.0 if task.config.operator == "conv" else 150.0
        error = errors[task.config.operator][task.config.seed - TRIAL_SEEDS]
        notebook.write(task.config, error, timings={"training": seconds})
    return notebook.state(contest)


def test_the_winner_with_its_cost(notebook):
    state = finals(notebook, small_contest(), {"conv": (20.0, 20.1, 20.2), "tanh-cos": (19.0, 19.1, 19.2)})
    p = stats.ttest_ind((20.0, 20.1, 20.2), (19.0, 19.1, 19.2), equal_var=False).pvalue
    assert str(state) == (
        f'"tanh-cos" wins: ahead of "conv" by 1.00 (19.10 against 20.10 %; Welch\'s t-test with Holm\'s '
        f"correction: p = {p:.2g}), "
        "at 1.50 times its training time."
    )
    first, second = state.standings
    assert (first.side, second.side, state.reference) == ("tanh-cos", "conv", "conv")
    assert (first.p, second.p) == (pytest.approx(p), None)
    # Seven trials of a half, two second seeds, and three final runs.
    assert (first.seconds, first.all_seconds) == (150.0, pytest.approx(9 * 75 + 3 * 150))


def test_the_reference_can_win(notebook):
    state = finals(notebook, small_contest(), {"conv": (19.0, 19.1, 19.2), "tanh-cos": (20.0, 20.1, 20.2)})
    assert str(state).startswith('"conv" wins: ahead of "tanh-cos" by 1.00')
    assert "at 0.67 times its training time" in str(state)


def test_chance_has_no_winner(notebook):
    state = finals(notebook, small_contest(), {"conv": (19.0, 19.5, 20.0), "tanh-cos": (19.1, 19.4, 19.9)})
    assert str(state).startswith('No difference beyond chance: "tanh-cos" is ahead of "conv" by 0.03 (19.47 against')


def test_no_verdict_without_deviation(notebook):
    contest = dataclasses.replace(small_contest(), seeds=1)
    assert str(finals(notebook, contest, {"conv": (19.0,), "tanh-cos": (19.1,)})) == NO_VERDICT


def test_several_references_and_challengers(notebook):
    """Challengers are compared with the best reference, and with Holm's correction."""
    rules = Contest((side("conv", True), side("linear-cos", True), side("tanh-cos"), side("seg-cos")))
    rules = dataclasses.replace(rules, trial={"steps": TRIAL_STEPS}, finalists=1)
    contest = contest_experiment("some", "some", rules)
    errors = {
        "conv": (22.0, 22.1, 22.2),
        "linear-cos": (20.0, 20.1, 20.3),
        "tanh-cos": (19.5, 19.6, 19.9),
        "seg-cos": (20.1, 20.2, 20.0),
    }
    state = finals(notebook, contest, errors)
    ps = {
        name: stats.ttest_ind(errors[name], errors["linear-cos"], equal_var=False).pvalue
        for name in ("tanh-cos", "seg-cos")
    }
    assert state.reference == "linear-cos"
    found = {one.side: one.p for one in state.standings}
    assert ps["tanh-cos"] < ps["seg-cos"]
    wanted = {"tanh-cos": 2 * ps["tanh-cos"], "seg-cos": ps["seg-cos"], "linear-cos": None, "conv": None}
    assert found == {name: value if value is None else pytest.approx(value) for name, value in wanted.items()}


def test_final_runs_have_other_seeds_than_trials(notebook):
    contest = small_contest()
    seeds = {HELD_OUT: set(), TEST: set()}
    for _ in range(3):
        for cell in notebook.experiment(contest).cells:
            seeds[cell.column] |= {config.seed for config in cell.configs(contest.seeds)}
        fill_stage(notebook, contest)
    assert seeds == {HELD_OUT: {0, 1}, TEST: {2, 3}}


def test_the_time_of_runs_that_diverged_counts(notebook):
    contest = small_contest()
    for _ in range(3):
        for task in plan_tasks([notebook.experiment(contest)], notebook.index):
            status = "diverged" if task.config.lr == 0.04 else "done"
            notebook.write(task.config, 20.0 + task.config.seed, status=status, timings={"training": 10.0})
    for one in notebook.state(contest).standings:
        assert (one.seconds, one.all_seconds) == (10.0, pytest.approx((7 + 2 + 2) * 10.0))


def four_sides(references=1):
    names = ("conv", "linear-cos", "tanh-cos", "seg-cos")
    rules = Contest(tuple(side(name, place < references) for place, name in enumerate(names)))
    return contest_experiment("some", "some", dataclasses.replace(rules, trial={"steps": TRIAL_STEPS}, finalists=1))


def test_some_sides_alone_have_the_p_values_of_the_whole_contest(notebook):
    """Otherwise, --only would turn chance into a winner."""
    contest = four_sides()
    errors = {
        "conv": (20.0, 20.1, 20.2),
        "tanh-cos": (19.7, 19.8, 19.9),
        "linear-cos": (21.0, 20.0, 22.0),
        "seg-cos": (21.0, 20.0, 22.0),
    }
    p = stats.ttest_ind(errors["tanh-cos"], errors["conv"], equal_var=False).pvalue
    assert p < 0.05 < 3 * p
    whole = finals(notebook, contest, errors)
    part = notebook.state(contest.only(["conv"]).only(["c"]))
    assert part.verdict == NO_VERDICT
    part = notebook.state(contest.only(["conv", "tanh", "seg"]).only(["conv", "tanh"]))
    assert [one.side for one in part.standings] == ["tanh-cos", "conv"]
    for state in (whole, part):
        assert state.standings[0].p == pytest.approx(3 * p)
        assert str(state).startswith('No difference beyond chance: "tanh-cos" is ahead of "conv"')


def test_a_challenger_that_did_not_converge_still_counts_as_a_test(notebook):
    errors = dict.fromkeys(("conv", "linear-cos", "tanh-cos", "seg-cos"), (20.0, 20.1, 20.2))
    state = finals(notebook, four_sides(), errors | {"tanh-cos": (19.0, 19.1, 19.2)})
    (last,) = [
        cell for cell in notebook.experiment(four_sides()).cells if cell.row[:3] == "seg" and cell.column == TEST
    ]
    notebook.write(last.configs(1)[0], 20.0, status="diverged")
    again = notebook.state(four_sides())
    assert [one.side for one in again.standings][-1] == "seg-cos"
    assert again.standings[-1].p is None
    assert again.standings[0].p == pytest.approx(state.standings[0].p)


def test_a_reference_that_was_chosen_by_the_test_set_wins_less_easily(notebook):
    """Of two references the better one is ahead, so its p value is doubled; for a challenger ahead it is not."""
    errors = {
        "conv": (22.0, 22.1, 22.2),
        "linear-cos": (20.0, 20.1, 20.2),
        "tanh-cos": (20.3, 20.4, 20.5),
        "seg-cos": (19.0, 19.1, 19.2),
    }
    p = {
        name: stats.ttest_ind(errors[name], errors["linear-cos"], equal_var=False).pvalue
        for name in ("tanh-cos", "seg-cos")
    }
    found = {one.side: one.p for one in finals(notebook, four_sides(2), errors).standings}
    assert found["seg-cos"] == pytest.approx(2 * p["seg-cos"])
    assert found["tanh-cos"] == pytest.approx(2 * p["tanh-cos"])


def test_the_winner_need_not_have_the_lowest_mean(notebook):
    """The seeds of the challenger with the lowest mean vary so much that it may be chance."""
    errors = {
        "conv": (20.0, 20.1, 20.2),
        "linear-cos": (15.0, 18.0, 22.0),
        "tanh-cos": (18.9, 19.0, 19.1),
        "seg-cos": (20.0, 20.1, 20.3),
    }
    state = finals(notebook, four_sides(), errors)
    assert state.standings[0].side == "linear-cos"
    assert str(state).startswith('"tanh-cos" wins: ahead of "conv" by 1.10 (19.00 against 20.10 %')


def test_equal_errors_of_all_seeds_have_no_verdict(notebook):
    state = finals(notebook, small_contest(), {"conv": (20.1, 20.1, 20.1), "tanh-cos": (19.7, 19.7, 19.7)})
    assert str(state) == NO_VERDICT


def test_an_unknown_training_time_has_no_ratio():
    sides = (standing("a", 19.0, 19.1, seconds=0.0), standing("b", 20.0, 20.1))
    state = ContestState((0, 0, 0), (), (dataclasses.replace(sides[0], p=0.01), sides[1]), "b")
    assert str(state).endswith("at unknown cost.")


def by_two_measures():
    first = Measure("corrupted error", ("evaluations", "some", "error"), 100.0, "some")
    rules = dataclasses.replace(small_contest().rules, measures=(first, Measure("clean error")))
    return contest_experiment("contest_two", "Digits, error in %", rules, seeds=2)


def fill_two_measures(notebook, contest):
    """The final runs have clean errors of 20 and 19, and corrupted errors of 30 and 40."""
    for _ in range(2):
        fill_stage(notebook, contest)
    for task in plan_tasks([notebook.experiment(contest)], notebook.index):
        if not task.evaluations:
            plain, noise = task.config.operator == "conv", 0.02 * task.config.seed
            error = {"error": (0.3 if plain else 0.4) + noise / 100}
            clean = (20.0 if plain else 19.0) + noise
            notebook.write(task.config, clean, timings={"training": 10.0}, evaluations={"some": error})


def test_final_runs_are_evaluated(notebook):
    """The final runs are evaluated, and missing until then."""
    contest = by_two_measures()
    for _ in range(2):
        fill_stage(notebook, contest)
    tasks = plan_tasks([notebook.experiment(contest)], notebook.index)
    assert [task.evaluations for task in tasks] == [(), (), ("some",), ("some",)] * 2
    fill_stage(notebook, contest)
    # The evaluations are missing.
    assert notebook.state(contest).missing == (0, 0, 4)


def test_verdicts_by_two_measures(notebook):
    contest = by_two_measures()
    fill_two_measures(notebook, contest)
    state = notebook.state(contest)
    assert (state.missing, state.measure, [one.side for one in state.standings]) == (
        (0, 0, 0),
        "corrupted error",
        ["conv", "tanh-cos"],
    )
    ((other,),) = [state.others]
    assert (other.measure, [one.side for one in other.standings]) == ("clean error", ["tanh-cos", "conv"])
    start, end = str(state).split(" By clean error: ")
    assert start.startswith('By corrupted error: "conv" wins: ahead of "tanh-cos" by 10.00 (30.05 against 40.05 %')
    assert end.startswith('"tanh-cos" wins: ahead of "conv" by 1.00 (19.05 against 20.05 %')
    # Two measures of the same final runs count their time once: seven trials of 50 or 75 s and two second seeds.
    assert [one.all_seconds for one in state.standings] == [pytest.approx(9 * 50 + 20), pytest.approx(9 * 75 + 20)]
    found = contest_table(state)
    assert [column.heading for column in found.columns] == [
        "side", "corrupted error", "clean error", "p"
    ]  # fmt: skip
    assert found.rows[0] == ["conv: Adam 0.02, decay 0", "30.05 ± 0.01", "20.05 ± 0.01", "reference"]
    assert state.to_json()["others"][0]["verdict"] == other.verdict
    assert contest.rules.small(lambda config: config).measures == contest.rules.measures


def test_tables_of_a_contest_fit_into_a_terminal(notebook):
    """First the trials alone, then the final runs so far, or the sides by all measures; no word is broken."""
    names = ("contrast and brightness", "shade", "all corruptions", "clean")
    rules = dataclasses.replace(
        small_contest().rules,
        sides=tuple(dataclasses.replace(one, name=f"{one.name}, standardized") for one in small_contest().rules.sides),
        measures=tuple(Measure(name) for name in names),
    )
    contest = contest_experiment("contest_small", "Digits, error in %", rules, seeds=2)
    for _ in range(3):
        fill_stage(notebook, contest)
    finished, larger = (notebook.experiment(one) for one in (contest, with_a_higher_rate(contest)))
    for experiment, title in (
        (finished, "The best recipe of each side, errors in %"),
        (larger, "The final runs so far"),
    ):
        trials, finals = experiment_tables(experiment, status_of(experiment, notebook.index))
        assert trials.headings == ["", HELD_OUT]
        assert len(trials.rows) == len([cell for cell in experiment.cells if cell.column == HELD_OUT])
        assert (finals.title, finals.headings[1:5], len(finals.rows)) == (title, [*names], 2)
        console = Console(file=io.StringIO(), width=80)
        console.print(finals)
        words = {word for row in [finals.headings, *finals.rows] for cell in row for word in cell.split()}
        assert words <= set(console.file.getvalue().split())


@pytest.fixture
def registered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "_entries", {**experiments, "contest_small": small_contest})


@pytest.mark.usefixtures("registered")
def test_the_page_and_the_docs_show_the_sides(notebook):
    finals(notebook, small_contest(), {"conv": (20.0, 20.1, 20.2), "tanh-cos": (19.0, 19.1, 19.2)})
    page = str(paper_sections.tables(Sources((notebook.folder,))))
    assert 'id="contest_small-sides-caption"' in page
    assert '"tanh-cos" wins: ahead of "conv" by 1.00' in page
    text = docs_table("contest_small", notebook.folder)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["| held-out error", "conv", "tanh-cos |"]
    held_out = {f"| {one.name}" for side in small_contest().rules.sides for one in side.candidates}
    assert {row[0] for row in rows if len(row) == 3} - {"| held-out error", "| ---"} == held_out
    assert "| tanh-cos | Adam 0.02, decay 0 | 19.10 ± 0.10 | 3 |" in text
    assert "| conv | Adam 0.02, decay 0 | 20.10 ± 0.10 | 3 | reference | 100 | 750 |" in text
    assert '"tanh-cos" wins' in text


@pytest.mark.usefixtures("registered")
def test_the_docs_name_a_few_missing_rows_and_count_many(notebook):
    tasks = plan_tasks([small_contest()], notebook.index)
    notebook.write(tasks[0].config, 20.0)
    assert "Without a run so far: 13 of 14 rows." in docs_table("contest_small", notebook.folder)
    for task in tasks[1:-1]:
        notebook.write(task.config, 20.0)
    assert "Without a run so far: tanh-cos: SGD 1, decay 0." in docs_table("contest_small", notebook.folder)


# --- the command ---


def run_command(capsys, *words):
    code = main([str(word) for word in ("reproduce", "contest-small", "--device", "cpu", *words)])
    return code, capsys.readouterr()


@pytest.mark.usefixtures("registered")
def test_a_whole_contest_runs_in_stages_and_only_once(tmp_path, capsys):
    words = ("--runs", tmp_path / "runs")
    code, seen = run_command(capsys, *words, "--status")
    assert "Stage 1 of 3 (trials) is open; missing runs: 14 trials" in seen.out
    code, seen = run_command(capsys, *words)
    assert code == 0
    assert "contest_small: 16 of 16 cells done" in seen.out
    assert "The best recipe of each side" in seen.out
    assert "reference" in seen.out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/record.json")}
    assert len(before) == 14 + 4 + 4
    assert run_command(capsys, *words)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/record.json")}
    found = json.loads(run_command(capsys, *words, "--status", "--json")[1].out)["contest_small"]
    assert found["contest"]["missing"] == [0, 0, 0]
    assert {one["side"] for one in found["contest"]["standings"]} == {"conv", "tanh-cos"}
    assert run_command(capsys, *words, "--status", "--collect", tmp_path / "kept")[0] == 0
    assert len(list((tmp_path / "kept").iterdir())) == len(before)


@pytest.mark.usefixtures("registered")
def test_a_contest_resumes_in_any_stage(tmp_path, capsys, monkeypatch):
    """Every call is interrupted after three tasks; together they run each task once."""
    notebook, ran = Notebook(tmp_path / "records"), []

    def interrupted(pool):
        for task in pool.pending[:3]:
            ran.append(task.label)
            config = task.config
            notebook.write(config, error_of(config.operator, config.lr, config.weight_decay, config.seed))
            pool.outcomes[task.label] = "done"
        return False

    monkeypatch.setattr("dcnet.experiments.pool.Pool.run", interrupted)
    words = ("--runs", tmp_path / "runs", "--records", notebook.folder)
    notebook.folder.mkdir()
    codes = [run_command(capsys, *words)[0] for _ in range(7)]
    # A call that ends a stage starts the next one, and is interrupted there.
    assert codes == [130] * 6 + [0]
    assert len(ran) == len(set(ran)) == 14 + 4 + 4
    assert notebook.state(small_contest()).missing == (0, 0, 0)


@pytest.mark.usefixtures("registered")
def test_all_trains_no_contest_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_entries", {"contest_small": small_contest})
    execution = Execution(device="cpu")
    counts = []
    for names, smoke in ((["all"], False), (["all", "contest-small"], False), (["all"], True)):
        work = Reproduction(names, None, smoke, tmp_path, (), execution, 1)
        assert [experiment.name for experiment, _ in work.statuses()] == ["contest_small"]
        counts.append(len(work._missing_tasks()))
    assert counts == [0, 14, 4]


@pytest.mark.usefixtures("registered")
def test_only_selects_sides(tmp_path, capsys):
    code, seen = run_command(capsys, "--runs", tmp_path, "--status", "--json", "--only", "tanh")
    assert code == 0
    rows = {cell["row"].partition(":")[0] for cell in json.loads(seen.out)["contest_small"]["cells"]}
    assert rows == {"tanh-cos"}
    code, seen = run_command(capsys, "--runs", tmp_path, "--status", "--only", "sphere")
    assert code == 2
    assert "--only 'sphere' matches no row or column: choose from conv; tanh-cos\n" in seen.err


@pytest.mark.usefixtures("registered")
def test_a_smoke_test_has_all_stages(tmp_path, capsys):
    code, seen = run_command(capsys, "--runs", tmp_path, "--smoke")
    assert code == 0
    assert "contest_small: 6 of 6 cells done" in seen.out
    # A recipe per family, a second seed and a final run on each side.
    assert len(list(tmp_path.glob("smoke/*/record.json"))) == 2 * (2 + 1 + 1)
