"""What is there, what is missing, and how far from the paper it is."""

import dataclasses
import json

import pytest
from fake_records import bring, run_with, small

from dcnet.experiments import Cell, CellStatus, Experiment, status_of
from dcnet.experiments.known import Known
from dcnet.experiments.smoke import ELSEWHERE, in_small
from dcnet.experiments.tasks import Task, planned
from dcnet.report.experiments import distance, markdown_table, rich_table, summary

CONV, TANH = small("conv"), small("tanh-cos")
EXPERIMENT = Experiment(
    "two",
    "two cells, error in %",
    (Cell("plain", "error", CONV, 20.0), Cell("tanh", "error", TANH, "N/C"), Cell("quoted", "error", None, 7.0)),
)


def seeded(config, seed):
    return dataclasses.replace(config, seed=seed)


def found(tmp_path, seeds=None, folders=()):
    return status_of(EXPERIMENT, Known(tmp_path / "runs", folders), seeds)


def test_nothing_is_there_at_first(tmp_path):
    assert [status.state for status in found(tmp_path)] == ["missing", "missing", "quoted"]
    assert [str(status) for status in found(tmp_path)] == ["missing (20.00)", "missing (N/C)", "- (7.00)"]


def test_records_of_runs_and_from_elsewhere_count_alike(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0)
    bring(tmp_path / "brought" / "deep", seeded(CONV, 1), 24.0, name="any-name")
    (plain, *_) = found(tmp_path, seeds=2, folders=[tmp_path / "brought"])
    assert (plain.state, plain.values, plain.mean) == ("done", (22.0, 24.0), 23.0)
    assert plain.deviation == pytest.approx(2**0.5)
    assert (plain.difference, plain.misses_by(False), plain.misses_by(True)) == (3.0, 3.0, 0.0)
    assert str(plain) == "23.00 ± 1.41 (20.00, +3.00)"
    apart = dataclasses.replace(plain, values=(22.0, 56.25))
    assert str(apart) == "39.12 ± 24.22 [22.0 56.2] (20.00, +19.12)"
    assert [status.state for status in found(tmp_path, seeds=3)] == ["partial", "missing", "quoted"]


def test_the_difference_is_that_of_the_numbers_that_are_shown():
    cell = Cell("plain", "error", small(), 58.24)
    assert str(CellStatus(cell, (37.85, 37.54), 0, 2)) == "37.70 ± 0.22 (58.24, -20.54)"


@pytest.mark.parametrize("error", [19.996, 20.004, 20.0 + 1e-13])
def test_what_a_table_shows_as_the_same_is_neither_better_nor_worse(tmp_path, error):
    run_with(tmp_path / "runs", CONV, error)
    (plain, *_) = found(tmp_path)
    assert str(plain) == "20.00 (20.00, +0.00)"
    assert plain.misses_by(False) == plain.misses_by(True) == 0
    assert distance(EXPERIMENT, plain) == "+0.00"


def test_a_run_that_diverged_is_an_answer_and_one_under_way_is_none(tmp_path):
    run_with(tmp_path / "runs", TANH, status="diverged")
    run_with(tmp_path / "runs", CONV, status="running")
    plain, tanh, _ = found(tmp_path)
    assert (plain.state, tanh.state, str(tanh), tanh.difference) == ("missing", "done", "N/C (N/C)", None)


def test_other_json_among_the_records_is_passed_over(tmp_path):
    bring(tmp_path / "brought", CONV, 21.0)
    (tmp_path / "brought" / "layers_cpu.json").write_text(json.dumps({"benchmark": "layers"}))
    (tmp_path / "brought" / "broken.json").write_text("{")
    assert found(tmp_path, folders=[tmp_path / "brought"])[0].values == (21.0,)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        found(tmp_path, folders=[tmp_path / "nowhere"])


def test_two_records_of_one_run_count_with_the_evaluations_of_both(tmp_path):
    for folder, name in (("one", "fgsm"), ("two", "pgd"), ("two", "bim")):
        bring(tmp_path / folder / name, CONV, 22.0, evaluations={name: {"accuracy": 1.0}})
    record = Known(tmp_path / "runs", [tmp_path / "one", tmp_path / "two"]).record(CONV)
    assert record["evaluations"].keys() == {"fgsm", "pgd", "bim"}


def test_what_was_measured_here_counts_before_what_was_brought(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0, evaluations={"fgsm": {"accuracy": 1.0}})
    bring(tmp_path / "brought", CONV, 23.0, evaluations={"fgsm": {"accuracy": 2.0}})
    record = Known(tmp_path / "runs", [tmp_path / "brought"]).record(CONV)
    assert (record["evaluations"]["fgsm"]["accuracy"], record["results"]["test_error"]) == (1.0, 22.0)


def test_a_record_with_an_evaluation_adds_it_to_the_run(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0)
    bring(tmp_path / "brought", CONV, 22.0, evaluations={"faces": {"accuracy": 90.0}})
    cell = Cell("plain", "faces", CONV, metric=("evaluations", "faces", "accuracy"), evaluation="faces")
    experiment = Experiment("faces", "accuracy", (cell,), higher_is_better=True)
    assert status_of(experiment, Known(tmp_path / "runs"))[0].state == "missing"
    assert status_of(experiment, Known(tmp_path / "runs", [tmp_path / "brought"]))[0].values == (90.0,)


def test_tasks_are_what_has_no_record_each_once_and_first_seeds_first(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0)
    twice = [EXPERIMENT, dataclasses.replace(EXPERIMENT, name="same")]
    tasks = planned(twice, Known(tmp_path / "runs"), seeds=2)
    assert tasks == [Task(TANH), Task(seeded(CONV, 1)), Task(seeded(TANH, 1))]


def test_tasks_add_evaluations_that_records_lack(tmp_path):
    cells = tuple(Cell(name, "x", CONV, metric=("evaluations", name), evaluation=name) for name in ("a", "b"))
    experiment = Experiment("both", "both", cells)
    known, training = Known(tmp_path / "runs"), Task(CONV)
    after = frozenset([training.name])
    assert planned([experiment], known) == [training, Task(CONV, ("a", "b"), after)]
    run_with(tmp_path / "runs", CONV, 22.0)
    assert planned([experiment], known) == [Task(CONV, ("a", "b"))]
    run_with(tmp_path / "runs", CONV, 22.0, evaluations={"a": 1.0})
    assert planned([experiment], known) == [Task(CONV, ("b",))]
    run_with(tmp_path / "runs", CONV, status="diverged")
    assert planned([experiment], known) == []


def test_all_of_the_first_seeds_comes_before_the_next_and_what_others_need_is_with_them(tmp_path):
    """Networks that attacks are made with have seeds of their own, and are needed as soon as the others."""
    attacked = Cell("plain", "attacked", CONV, metric=("evaluations", "a"), evaluation="a")
    source = Cell("source", "clean", CONV, first_seed=100)
    tasks = planned([Experiment("both", "both", (attacked, source), seeds=2)], Known(tmp_path / "runs"))
    seeds = [(task.config.seed, task.evaluations) for task in tasks]
    assert seeds == [(0, ()), (100, ()), (0, ("a",)), (1, ()), (101, ()), (1, ("a",))]
    assert tasks[2].after == {tasks[0].name, tasks[1].name}
    assert tasks[5].after == {tasks[3].name, tasks[4].name}


def test_a_network_that_guesses_at_its_end_did_not_converge(tmp_path):
    data = {"classes": [str(digit) for digit in range(10)]}
    for error, shown in ((89.5, "N/C (20.00)"), (75.0, "75.00 (20.00, +55.00)")):
        run_with(tmp_path / "runs", CONV, error, data=data)
        status = found(tmp_path)[0]
        assert (status.state, str(status)) == ("done", shown)


def test_what_is_not_run_gives_no_tasks(tmp_path):
    apart = dataclasses.replace(EXPERIMENT, not_run="it needs what is not there")
    assert planned([apart], Known(tmp_path / "runs")) == []
    statuses = status_of(apart, Known(tmp_path / "runs"))
    assert summary(apart, statuses) == "two: not run, since it needs what is not there"


def test_tables_and_a_sentence(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.5)
    statuses = found(tmp_path)
    assert "| plain | 22.50 (20.00, +2.50) |" in markdown_table(EXPERIMENT, statuses)
    assert rich_table(EXPERIMENT, statuses).row_count == 3
    there = "two: 1 of 2 cells are there"
    assert summary(EXPERIMENT, statuses) == f"{there}; plain, error is furthest from the paper, +2.50 (worse)"
    higher = dataclasses.replace(EXPERIMENT, higher_is_better=True)
    assert summary(higher, statuses) == f"{there}; plain, error is furthest from the paper, +2.50 (better)"
    assert summary(EXPERIMENT, found(tmp_path / "elsewhere")) == "two: 0 of 2 cells are there"
    more = dataclasses.replace(EXPERIMENT, seeds=2)
    told = summary(more, status_of(more, Known(tmp_path / "runs")))
    assert told.startswith("two: 0 of 2 cells are there, and 1 with fewer seeds; ")


def test_the_furthest_from_the_paper_is_so_either_way(tmp_path):
    cells = tuple(Cell(config.operator, "error", config, 20.0) for config in (CONV, TANH))
    experiment = Experiment("both", "both, error in %", cells)
    for config, error in ((CONV, 21.0), (TANH, 4.0)):
        run_with(tmp_path / "runs", config, error)
    statuses = status_of(experiment, Known(tmp_path / "runs"))
    assert summary(experiment, statuses).endswith("; tanh-cos, error is furthest from the paper, -16.00 (better)")


def test_every_seed_that_has_a_record_counts(tmp_path):
    """Be it more than are wanted, and with gaps; a number that is asked for is that of the first seeds."""
    run_with(tmp_path / "runs", seeded(CONV, 1), 22.0)
    bring(tmp_path / "brought", seeded(CONV, 4), 24.0, name="any-name")
    folders = [tmp_path / "brought"]
    plain = found(tmp_path, folders=folders)[0]
    assert (plain.state, plain.values) == ("done", (22.0, 24.0))
    assert found(tmp_path, seeds=1, folders=folders)[0].state == "missing"
    assert found(tmp_path, seeds=2, folders=folders)[0].values == (22.0,)
    three = dataclasses.replace(EXPERIMENT, seeds=3)
    known = Known(tmp_path / "runs", folders)
    assert (status_of(three, known)[0].state, status_of(three, known)[0].seeds) == ("partial", 3)


def test_seeds_of_other_networks_are_not_counted(tmp_path):
    """Those that attacks are made with have the same config, and seeds from 100 on."""
    for seed, error in ((0, 20.0), (100, 30.0), (101, 32.0)):
        run_with(tmp_path / "runs", seeded(CONV, seed), error)
    cells = Cell("attacked", "error", CONV), Cell("source", "error", CONV, first_seed=100)
    statuses = status_of(Experiment("both", "both", cells), Known(tmp_path / "runs"))
    assert [status.values for status in statuses] == [(20.0,), (30.0, 32.0)]


def test_the_legend_is_there_only_where_the_paper_has_a_number(tmp_path):
    own = dataclasses.replace(EXPERIMENT, cells=(Cell("plain", "error", CONV),), notes=("A note.",))
    statuses = status_of(own, Known(tmp_path / "runs"))
    assert rich_table(own, statuses).caption == "A note."
    assert rich_table(EXPERIMENT, found(tmp_path)).caption == "ours (the paper's, the difference)"


def test_what_a_smoke_test_does_not_measure_is_no_number(tmp_path):
    cells = tuple(
        Cell("plain", name, CONV, 9.0, ("evaluations", name, "auc"), 100.0, evaluation=name) for name in ELSEWHERE
    )
    small_one = in_small(Experiment("faces", "faces, in %", (*cells, Cell("plain", "error", CONV, 9.0))))
    (config,) = {cell.config for cell in small_one.cells}
    known = Known(tmp_path / "runs")
    assert {str(status) for status in status_of(small_one, known)} == {"missing"}
    assert planned([small_one], known) == [Task(config)]
    run_with(tmp_path / "runs", config, 12.5)
    statuses = status_of(small_one, known)
    assert [str(status) for status in statuses] == ["not in a smoke test"] * len(ELSEWHERE) + ["12.50"]
    assert (statuses[0].state, statuses[0].mean, statuses[0].described(True)["unmeasured"]) == ("done", None, 1)
    assert planned([small_one], known) == []
    last = "which is not in a smoke test"
    counts = f"faces: {len(cells) + 1} of {len(cells) + 1} cells are there"
    assert summary(small_one, statuses) == f"{counts}, {len(cells)} of them without their number, {last}"
    assert "the paper's" not in str(rich_table(small_one, statuses).caption)


def test_a_share_is_shown_in_percent_and_found_in_lists_too():
    cell = Cell("plain", "faces", CONV, metric=("evaluations", "faces", "rates", 1, "tar"), factor=100.0)
    record = {"evaluations": {"faces": {"rates": [{"tar": 0.9}, {"tar": 0.25}]}}}
    assert cell.value(record) == 25.0
    assert cell.value({"evaluations": {"faces": {"rates": [{"tar": 0.9}]}}}) is None
    assert cell.value({"evaluations": {"faces": {"rates": [{"tar": 0.9}, {"tar": None}]}}}) is None


PARTS = [{"data": 3}, {"data": {"classes": 3}}, {"results": [1]}, {"evaluations": None}, {"evaluations": "x"}]


@pytest.mark.parametrize("part", PARTS)
def test_a_record_with_something_else_in_a_place_counts_as_none(tmp_path, part):
    whole = json.loads(bring(tmp_path, CONV, 22.0, name="whole").read_text())
    (tmp_path / "damaged.json").write_text(json.dumps(whole | part))
    (plain, *_) = found(tmp_path, folders=[tmp_path])
    assert plain.values == (22.0,)


@pytest.mark.parametrize("error", [None, "x"])
def test_a_record_without_its_error_is_missing(tmp_path, error):
    bring(tmp_path, CONV, error, data={"classes": ["a", "b", "c"]})
    bring(tmp_path, TANH, 22.0, data={})
    assert [status.state for status in found(tmp_path, folders=[tmp_path])] == ["missing", "done", "quoted"]
