"""The status of cells: results, missing runs, difference from the paper; and the tasks that follow."""

import dataclasses
import json

import pytest
from helpers.fake_records import bring, run_with, small

from dcnet.experiments import Cell, CellStatus, Experiment, status_of
from dcnet.experiments.reproduction import NOT_IN_SMOKE_TESTS, smoke_test
from dcnet.experiments.status import RecordIndex, Task, plan_tasks
from dcnet.report.experiment_tables import distance, experiment_table, summary
from dcnet.training import Record

CONV, TANH = small("conv"), small("tanh-cos")
EXPERIMENT = Experiment(
    "two",
    "two cells, error in %",
    (Cell("plain", "error", CONV, 20.0), Cell("tanh", "error", TANH, "N/C"), Cell("quoted", "error", None, 7.0)),
)


def seeded(config, seed):
    return dataclasses.replace(config, seed=seed)


def found(tmp_path, seeds=None, folders=()):
    return status_of(EXPERIMENT, RecordIndex(tmp_path / "runs", folders), seeds)


def test_without_records(tmp_path):
    assert [status.state for status in found(tmp_path)] == ["missing", "missing", "quoted"]
    assert [str(status) for status in found(tmp_path)] == ["missing (20.00)", "missing (N/C)", "- (7.00)"]


def test_records_of_runs_and_of_folders(tmp_path):
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


def test_the_difference_is_rounded_like_its_numbers():
    cell = Cell("plain", "error", small(), 58.24)
    assert str(CellStatus(cell, (37.85, 37.54), 0, 2)) == "37.70 ± 0.22 (58.24, -20.54)"


def test_targets_count_the_runs_that_reach_them():
    cell = Cell("plain", "accuracy", small(), target=75.0)
    status = CellStatus(cell, (74.99, 75.0, 75.4), 1, 4)
    assert str(status) == "75.13 ± 0.23, 1 N/C (2 of 4 reach 75)"
    assert (status.to_json(True)["target"], status.to_json(True)["reached"]) == (75.0, 2)
    assert str(CellStatus(cell, (), 0, 4)) == "missing"
    plain = CellStatus(Cell("plain", "accuracy", small()), (75.0,), 0, 1)
    assert plain.reached is None
    assert "reached" not in plain.to_json(True)


@pytest.mark.parametrize("error", [19.996, 20.004, 20.0 + 1e-13])
def test_equal_after_rounding_is_neither_better_nor_worse(tmp_path, error):
    run_with(tmp_path / "runs", CONV, error)
    (plain, *_) = found(tmp_path)
    assert str(plain) == "20.00 (20.00, +0.00)"
    assert plain.misses_by(False) == plain.misses_by(True) == 0
    assert distance(EXPERIMENT, plain) == "+0.00"


def test_a_diverged_run_is_a_result_and_a_running_one_is_not(tmp_path):
    run_with(tmp_path / "runs", TANH, status="diverged")
    run_with(tmp_path / "runs", CONV, status="running")
    plain, tanh, _ = found(tmp_path)
    assert (plain.state, tanh.state, str(tanh), tanh.difference) == ("missing", "done", "N/C (N/C)", None)


def test_other_json_is_ignored(tmp_path):
    bring(tmp_path / "brought", CONV, 21.0)
    (tmp_path / "brought" / "layers_cpu.json").write_text(json.dumps({"benchmark": "layers"}))
    (tmp_path / "brought" / "broken.json").write_text("{")
    assert found(tmp_path, folders=[tmp_path / "brought"])[0].values == (21.0,)


def test_error_for_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        found(tmp_path, folders=[tmp_path / "nowhere"])


def test_records_of_one_run_are_merged(tmp_path):
    for folder, name in (("one", "fgsm"), ("two", "pgd"), ("two", "bim")):
        bring(tmp_path / folder / name, CONV, 22.0, evaluations={name: {"accuracy": 1.0}})
    record = RecordIndex(tmp_path / "runs", [tmp_path / "one", tmp_path / "two"]).record(CONV)
    assert record.evaluations.keys() == {"fgsm", "pgd", "bim"}


def test_local_records_take_precedence(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0, evaluations={"fgsm": {"accuracy": 1.0}})
    bring(tmp_path / "brought", CONV, 23.0, evaluations={"fgsm": {"accuracy": 2.0}})
    record = RecordIndex(tmp_path / "runs", [tmp_path / "brought"]).record(CONV)
    assert (record.evaluations["fgsm"].extra["accuracy"], record.results.test_error) == (1.0, 22.0)


def test_evaluations_of_another_record_are_added(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0)
    bring(tmp_path / "brought", CONV, 22.0, evaluations={"faces": {"accuracy": 90.0}})
    cell = Cell("plain", "faces", CONV, metric=("evaluations", "faces", "accuracy"), evaluation="faces")
    experiment = Experiment("faces", "accuracy", (cell,), higher_is_better=True)
    assert status_of(experiment, RecordIndex(tmp_path / "runs"))[0].state == "missing"
    assert status_of(experiment, RecordIndex(tmp_path / "runs", [tmp_path / "brought"]))[0].values == (90.0,)


@pytest.mark.parametrize("in_run", [True, False])
def test_a_record_whose_config_was_edited_does_not_count(tmp_path, in_run):
    config = small(lr=0.01)
    file = run_with(tmp_path, config, 1.0).record_file if in_run else bring(tmp_path, config, 1.0)
    known = json.loads(file.read_text())
    for rate, counts in ((0.02, False), (0.01, True)):
        file.write_text(json.dumps({**known, "config": small(lr=rate).described()}))
        index = RecordIndex(tmp_path, () if in_run else [tmp_path])
        assert (index.record(config) is not None) is counts


def test_tasks_are_unique_and_first_seeds_come_first(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.0)
    twice = [EXPERIMENT, dataclasses.replace(EXPERIMENT, name="same")]
    tasks = plan_tasks(twice, RecordIndex(tmp_path / "runs"), seeds=2)
    assert tasks == [Task(TANH), Task(seeded(CONV, 1)), Task(seeded(TANH, 1))]


def test_tasks_include_missing_evaluations(tmp_path):
    cells = tuple(Cell(name, "x", CONV, metric=("evaluations", name), evaluation=name) for name in ("a", "b"))
    experiment = Experiment("both", "both", cells)
    known, training = RecordIndex(tmp_path / "runs"), Task(CONV)
    after = frozenset([training.name])
    assert plan_tasks([experiment], known) == [training, Task(CONV, ("a", "b"), after)]
    run_with(tmp_path / "runs", CONV, 22.0)
    assert plan_tasks([experiment], known) == [Task(CONV, ("a", "b"))]
    run_with(tmp_path / "runs", CONV, 22.0, evaluations={"a": {}})
    assert plan_tasks([experiment], known) == [Task(CONV, ("b",))]
    run_with(tmp_path / "runs", CONV, status="diverged")
    assert plan_tasks([experiment], known) == []


def test_evaluations_at_the_end_of_a_run_are_a_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("dcnet.experiments.status.at_end_of_run", {"b"})
    cells = tuple(Cell(name, "x", CONV, metric=("evaluations", name), evaluation=name) for name in ("a", "b"))
    experiment, known = Experiment("both", "both", cells), RecordIndex(tmp_path / "runs")
    training = Task(CONV, at_end=("b",))
    assert plan_tasks([experiment], known) == [training, Task(CONV, ("a",), frozenset([training.name]))]
    # A record of a version without the evaluation.
    run_with(tmp_path / "runs", CONV, 22.0)
    assert plan_tasks([experiment], known) == [Task(CONV, ("a", "b"))]
    run_with(tmp_path / "runs", CONV, 22.0, evaluations={"a": {}, "b": {}})
    assert plan_tasks([experiment], known) == []


def test_sources_are_planned_with_the_first_seed(tmp_path):
    """Source networks have their own seeds, and are needed as early as the attacked ones."""
    attacked = Cell("plain", "attacked", CONV, metric=("evaluations", "a"), evaluation="a")
    source = Cell("source", "clean", CONV, first_seed=100)
    tasks = plan_tasks([Experiment("both", "both", (attacked, source), seeds=2)], RecordIndex(tmp_path / "runs"))
    seeds = [(task.config.seed, task.evaluations) for task in tasks]
    assert seeds == [(0, ()), (100, ()), (0, ("a",)), (1, ()), (101, ()), (1, ("a",))]
    assert tasks[2].after == {tasks[0].name, tasks[1].name}
    assert tasks[5].after == {tasks[3].name, tasks[4].name}


def test_a_network_at_chance_level_did_not_converge(tmp_path):
    data = {"classes": [str(digit) for digit in range(10)]}
    for error, shown in ((89.5, "N/C (20.00)"), (75.0, "75.00 (20.00, +55.00)")):
        run_with(tmp_path / "runs", CONV, error, data=data)
        status = found(tmp_path)[0]
        assert (status.state, str(status)) == ("done", shown)


def test_experiments_not_run_have_no_tasks(tmp_path):
    apart = dataclasses.replace(EXPERIMENT, not_run="it needs what is not there")
    assert plan_tasks([apart], RecordIndex(tmp_path / "runs")) == []
    statuses = status_of(apart, RecordIndex(tmp_path / "runs"))
    assert summary(apart, statuses) == "two: not run: it needs what is not there"


def test_table_and_summary(tmp_path):
    run_with(tmp_path / "runs", CONV, 22.5)
    statuses = found(tmp_path)
    assert "| plain | 22.50 (20.00, +2.50) |" in experiment_table(EXPERIMENT, statuses).markdown()
    assert len(experiment_table(EXPERIMENT, statuses).rows) == 3
    there = "two: 1 of 2 cells done"
    assert summary(EXPERIMENT, statuses) == f"{there}; largest difference from the paper: +2.50 (worse) at plain, error"
    higher = dataclasses.replace(EXPERIMENT, higher_is_better=True)
    assert summary(higher, statuses) == f"{there}; largest difference from the paper: +2.50 (better) at plain, error"
    assert summary(EXPERIMENT, found(tmp_path / "elsewhere")) == "two: 0 of 2 cells done"
    more = dataclasses.replace(EXPERIMENT, seeds=2)
    text = summary(more, status_of(more, RecordIndex(tmp_path / "runs")))
    assert text.startswith("two: 0 of 2 cells done, 1 with fewer seeds; ")


def test_the_furthest_cell_may_be_better(tmp_path):
    cells = tuple(Cell(config.operator, "error", config, 20.0) for config in (CONV, TANH))
    experiment = Experiment("both", "both, error in %", cells)
    for config, error in ((CONV, 21.0), (TANH, 4.0)):
        run_with(tmp_path / "runs", config, error)
    statuses = status_of(experiment, RecordIndex(tmp_path / "runs"))
    assert summary(experiment, statuses).endswith(
        "; largest difference from the paper: -16.00 (better) at tanh-cos, error"
    )


def test_all_seeds_with_a_record_count(tmp_path):
    """Even if there are more than requested, or gaps; an explicit number selects the first seeds."""
    run_with(tmp_path / "runs", seeded(CONV, 1), 22.0)
    bring(tmp_path / "brought", seeded(CONV, 4), 24.0, name="any-name")
    folders = [tmp_path / "brought"]
    plain = found(tmp_path, folders=folders)[0]
    assert (plain.state, plain.values) == ("done", (22.0, 24.0))
    assert found(tmp_path, seeds=1, folders=folders)[0].state == "missing"
    assert found(tmp_path, seeds=2, folders=folders)[0].values == (22.0,)
    three = dataclasses.replace(EXPERIMENT, seeds=3)
    known = RecordIndex(tmp_path / "runs", folders)
    assert (status_of(three, known)[0].state, status_of(three, known)[0].seeds) == ("partial", 3)


def test_seeds_of_other_networks_are_not_counted(tmp_path):
    """Source networks have the same config, and seeds from 100 on."""
    for seed, error in ((0, 20.0), (100, 30.0), (101, 32.0)):
        run_with(tmp_path / "runs", seeded(CONV, seed), error)
    cells = Cell("attacked", "error", CONV), Cell("source", "error", CONV, first_seed=100)
    statuses = status_of(Experiment("both", "both", cells), RecordIndex(tmp_path / "runs"))
    assert [status.values for status in statuses] == [(20.0,), (30.0, 32.0)]


def test_the_legend_needs_a_number_of_the_paper(tmp_path):
    own = dataclasses.replace(EXPERIMENT, cells=(Cell("plain", "error", CONV),), notes=("A note.",))
    statuses = status_of(own, RecordIndex(tmp_path / "runs"))
    assert list(experiment_table(own, statuses).notes) == ["A note."]
    assert list(experiment_table(EXPERIMENT, found(tmp_path)).notes) == ["ours (the paper's, the difference)"]


def test_a_smoke_test_leaves_out_some_evaluations(tmp_path):
    cells = tuple(
        Cell("plain", name, CONV, 9.0, ("evaluations", name, "auc"), 100.0, evaluation=name)
        for name in NOT_IN_SMOKE_TESTS
    )
    small_one = smoke_test(Experiment("faces", "faces, in %", (*cells, Cell("plain", "error", CONV, 9.0))))
    (config,) = {cell.config for cell in small_one.cells}
    known = RecordIndex(tmp_path / "runs")
    assert {str(status) for status in status_of(small_one, known)} == {"missing"}
    assert plan_tasks([small_one], known) == [Task(config)]
    run_with(tmp_path / "runs", config, 12.5)
    statuses = status_of(small_one, known)
    assert [str(status) for status in statuses] == ["not in a smoke test"] * len(NOT_IN_SMOKE_TESTS) + ["12.50"]
    assert (statuses[0].state, statuses[0].mean, statuses[0].to_json(True)["unmeasured"]) == ("done", None, 1)
    assert plan_tasks([small_one], known) == []
    last = "(not in a smoke test)"
    counts = f"faces: {len(cells) + 1} of {len(cells) + 1} cells done"
    assert summary(small_one, statuses) == f"{counts}, {len(cells)} of them without a number {last}"
    assert "the paper's" not in str(experiment_table(small_one, statuses).notes)


def test_a_metric_can_index_lists_and_has_a_factor():
    cell = Cell("plain", "faces", CONV, metric=("evaluations", "faces", "rates", 1, "tar"), factor=100.0)
    for rates, expected in {(0.9, 0.25): 25.0, (0.9,): None, (0.9, None): None}.items():
        record = Record.from_json({"evaluations": {"faces": {"rates": [{"tar": rate} for rate in rates]}}})
        assert cell.value(record) == expected


PARTS = [{"data": 3}, {"data": {"classes": 3}}, {"results": [1]}, {"evaluations": None}, {"evaluations": "x"}]


@pytest.mark.parametrize("part", PARTS)
def test_an_invalid_record_is_ignored(tmp_path, part):
    whole = json.loads(bring(tmp_path, CONV, 22.0, name="whole").read_text())
    (tmp_path / "damaged.json").write_text(json.dumps(whole | part))
    (plain, *_) = found(tmp_path, folders=[tmp_path])
    assert plain.values == (22.0,)


@pytest.mark.parametrize("error", [None, "x"])
def test_a_record_without_a_test_error_is_missing(tmp_path, error):
    bring(tmp_path, CONV, error, data={"classes": ["a", "b", "c"]})
    bring(tmp_path, TANH, 22.0, data={})
    assert [status.state for status in found(tmp_path, folders=[tmp_path])] == ["missing", "done", "quoted"]
