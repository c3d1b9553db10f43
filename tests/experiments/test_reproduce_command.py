"""`dcnet reproduce` as a user meets it."""

import json
import re
from pathlib import Path

import pytest
from fake_records import bring

from dcnet.cli.app import main
from dcnet.experiments import chosen
from dcnet.experiments.reproduction import jobs_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Away from the records of this repository, which would count."""
    monkeypatch.chdir(tmp_path)


def told(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def test_status_runs_nothing_and_says_what_is_missing(tmp_path, capsys):
    bring(tmp_path / "brought", chosen(["table1"])[0].cell("weight projection", "tanh-cos").config, 21.5)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs", "--records", tmp_path / "brought")
    code, seen = told(capsys, *words)
    assert code == 0
    assert "21.50 (21.17, +0.33)" in seen.out
    told_most = "weight projection, tanh-cos is furthest from the paper, +0.33 (worse)"
    assert f"table1: 1 of 6 cells are there; {told_most}" in seen.out
    assert not (tmp_path / "runs").exists()
    cells = json.loads(told(capsys, *words, "--json")[1].out)["table1"]["cells"]
    assert [cell["state"] for cell in cells] == ["missing"] * 4 + ["done", "missing"]
    assert cells[4]["misses_by"] == pytest.approx(0.33)


def test_what_was_copied_in_part_is_named_and_what_is_something_else_is_not(tmp_path, capsys):
    brought, config = tmp_path / "brought", chosen(["table1"])[0].cells[0].config
    cut = bring(brought, config)
    cut.write_text(cut.read_text()[:100])
    (brought / "other.json").write_text("[1]")
    (brought / "folder.json").mkdir()
    words = ("reproduce", "table1", "--status", "--json", "--runs", tmp_path / "runs", "--records", brought)
    code, seen = told(capsys, *words)
    assert code == 0
    assert seen.err.startswith(f"dcnet: left out {str(cut)!r}, which cannot be read: ")
    assert seen.err.count("\n") == 1
    assert json.loads(seen.out)["table1"]["cells"][0]["state"] == "missing"


def test_a_record_with_what_json_has_no_word_for_is_named_and_not_collected(tmp_path, capsys):
    """All that is written of it, a copy or a page, would have to be without it."""
    brought, cells = tmp_path / "brought", chosen(["table1"])[0].cells
    whole, strange = bring(brought, cells[0].config), bring(brought, cells[1].config, loss=float("nan"))
    words = ("--status", "--runs", tmp_path / "runs", "--records", brought, "--collect", tmp_path / "kept")
    code, seen = told(capsys, "reproduce", "table1", *words)
    assert (code, seen.err) == (0, f"dcnet: left out {str(strange)!r}, which cannot be read: JSON has no NaN\n")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == [whole.name]


def test_nearness_and_order_are_told_to_people_and_machines(tmp_path, capsys):
    plain, _, sphere, *_ = chosen(["table3"])[0].cells
    for config, error in zip((*plain.configs(2), sphere.config), (50.0, 51.0, 60.0), strict=True):
        bring(tmp_path / "brought", config, error)
    words = ("reproduce", "table3", "--status", "--runs", tmp_path / "runs", "--records", tmp_path / "brought")
    seen = told(capsys, *words)[1].out
    assert (
        "table3: of 2 cells to compare, 1 is within 1.00 of the paper or better; not sphere in cos, no ReLU (+26.69)"
        in seen
    )
    assert "0 come in its order; not baseline and sphere in cos, no ReLU" in seen
    found = json.loads(told(capsys, *words, "--json")[1].out)["table3"]
    assert found["near"] == {"within": 1.0, "cells": 2, "behind": [["sphere", "cos, no ReLU", 26.69]]}
    assert (found["order"]["pairs"], found["order"]["turned"]) == (1, [["cos, no ReLU", "baseline", "sphere"]])


def test_on_a_narrow_terminal_no_number_is_cut_off(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, seen = told(capsys, "reproduce", "table2", "--status", "--runs", tmp_path)
    assert "normalisation" in seen.out
    assert "\N{HORIZONTAL ELLIPSIS}" not in seen.out


def test_rows_and_columns_can_be_chosen_by_how_they_begin(tmp_path, capsys):
    words = ("reproduce", "table3", "table1", "--status", "--json", "--runs", tmp_path, "--only")
    found = json.loads(told(capsys, *words, "seg", "cos, ReLU")[1].out)
    assert list(found) == ["table3"]
    cells = {(cell["row"], cell["column"]) for cell in found["table3"]["cells"]}
    assert cells == {
        (cell.row, cell.column)
        for cell in chosen(["table3"])[0].cells
        if cell.row == "seg" or cell.column == "cos, ReLU"
    }
    found = json.loads(told(capsys, *words, "seg, sqcos")[1].out)
    assert [cell["column"] for cell in found["table3"]["cells"]] == ["sqcos, no ReLU", "sqcos, ReLU"]
    code, seen = told(capsys, *words, "seg", "os, ReLU")
    assert code == 2
    assert "--only 'os, ReLU' begins no row and no column: there are baseline; sphere;" in seen.err
    _, seen = told(capsys, "reproduce", "table3", "--only", "", "--status")
    assert "--only is '', with which every row begins" in seen.err
    code, seen = told(capsys, "reproduce", "figure4", "--only", "seg", "--runs", tmp_path)
    assert (code, seen.err) == (2, "dcnet: --only 'seg' chooses cells of tables: name a table, such as table3\n")


def test_records_that_come_with_the_source_count_without_a_word(tmp_path, capsys):
    bring(tmp_path / "results", chosen(["table1"])[0].cell("weight projection", "tanh-cos").config, 21.5)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs")
    assert "table1: 1 of 6 cells are there" in told(capsys, *words)[1].out
    (tmp_path / "others").mkdir()
    assert "table1: 0 of 6 cells are there" in told(capsys, *words, "--records", tmp_path / "others")[1].out


def test_a_smoke_test_of_a_table_runs_all_of_it_and_then_nothing_more(tmp_path, capsys):
    words = ("reproduce", "table1", "--smoke", "--runs", tmp_path, "--device", "cpu", "--collect", tmp_path / "kept")
    code, seen = told(capsys, *words)
    assert code == 0
    assert "table1: 6 of 6 cells are there" in seen.out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("smoke/*/record.json")}
    assert len(before) == len(list((tmp_path / "kept").glob("*.json"))) == 6
    assert told(capsys, *words)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    words = ("reproduce", "table1", "--smoke", "--status", "--runs", tmp_path / "new", "--records", tmp_path / "kept")
    assert "table1: 6 of 6 cells are there" in told(capsys, *words)[1].out


def test_a_smoke_test_of_everything(tmp_path, capsys):
    code, seen = told(capsys, "reproduce", "all", "--smoke", "--runs", tmp_path, "--device", "cpu")
    assert code == 0, seen.err
    for experiment in chosen(["all"]):
        cells = sum(cell.config is not None for cell in experiment.cells)
        assert f"{experiment.name}: {cells} of {cells} cells are there" in seen.out
    for name in ("faces", "attacks_today"):
        part = seen.out.partition(f"{name}: ")[0].rpartition("┡")[2]
        assert "not in a" in part
        assert not re.search(r"\d\d\.\d\d", part)
    assert "the numbers mean nothing" in " ".join(seen.out.split())


@pytest.mark.parametrize(("ended", "code"), [("done", 0), ("interrupted", 130)])
def test_who_interrupts_the_last_task_and_it_ends_all_the_same_has_not_interrupted(
    ended, code, tmp_path, capsys, monkeypatch
):
    def interrupted(pool):
        pool.outcomes = {task.label: "done" for task in pool.left[1:]} | {pool.left[0].label: ended}
        return False

    monkeypatch.setattr("dcnet.experiments.pool.Pool.run", interrupted)
    found, seen = told(capsys, "reproduce", "table1", "--smoke", "--runs", tmp_path, "--device", "cpu")
    assert found == code
    assert ("stopped with 1 of 6 tasks to go" in seen.out) == (ended == "interrupted")


def test_after_an_interruption_what_is_left_is_said_last(tmp_path, capsys, monkeypatch):
    def stopped(work, console):
        console.print("stopped with 3 of 6 tasks to go; the same command goes on")
        return 130

    monkeypatch.setattr("dcnet.experiments.reproduction.Reproduction.run", stopped)
    words = ("reproduce", "table1", "figure3", "--runs", tmp_path, "--collect", tmp_path / "kept")
    code, seen = told(capsys, *words)
    assert code == 130
    assert seen.out == "stopped with 3 of 6 tasks to go; the same command goes on\n"
    code, seen = told(capsys, *words, "--json")
    assert code == 130
    assert list(json.loads(seen.out)) == ["table1"]
    assert seen.err.startswith("stopped with 3 of 6 tasks to go")


def test_status_counts_the_seeds_that_there_are_unless_told_otherwise(tmp_path, capsys):
    cell = chosen(["table1"])[0].cell("weight projection", "tanh-cos")
    for config, error in zip(cell.configs(3), (21.0, 22.0, 23.0), strict=True):
        bring(tmp_path / "results", config, error)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs")
    assert "22.00 ± 1.00 (21.17, +0.83)" in told(capsys, *words)[1].out
    assert "21.50 ± 0.71 (21.17, +0.33)" in told(capsys, *words, "--seeds", "2")[1].out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "name what to reproduce"),
        (("table33",), "'table33'"),
        (("figure44",), "unknown figure 'figure44'"),
        (("table1", "figure44", "--smoke"), "unknown figure 'figure44'"),
        (("figures", "--smoke"), "--smoke draws no figures: name what to reproduce, such as table3 or all"),
        (("table1", "--seeds", "0"), "--seeds"),
        (("table1", "--jobs", "many"), "--jobs is 'many': give a number from 1 to 64, or auto"),
        (("table1", "--jobs", "0"), "--jobs is '0'"),
        (("table1", "--records", "nowhere"), "there is no folder 'nowhere'"),
        (("table1", "--collect", "/proc/nothing"), "/proc/nothing"),
        (("figure3", "--out", "/proc/nothing"), "/proc/nothing"),
    ],
)
def test_wrong_options_are_one_sentence(words, problem, tmp_path, capsys):
    code, seen = told(capsys, "reproduce", *words, "--runs", tmp_path)
    assert code == 2
    assert problem in seen.err
    assert seen.err.count("\n") == 1


def test_jobs_by_themselves_are_many_only_where_processes_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert [jobs_of("auto", device) for device in ("cpu", "cuda")] == [1, 1]
    (tmp_path / "control").touch()
    assert [jobs_of("auto", device) for device in ("cpu", "cuda")] == [1, 4]
    assert jobs_of("3", "cpu") == 3


def test_figures_are_drawn_from_records_and_say_what_is_missing(tmp_path, capsys):
    words = ("reproduce", "figure3", "figure4", "figure6", "--runs", tmp_path, "--out", tmp_path / "drawn")
    code, seen = told(capsys, *words)
    assert code == 0
    assert f"figure3: {tmp_path / 'drawn' / 'figure3.png'}" in seen.out
    assert "figure4: figure4 needs two records of ResNet-32 or more: run `dcnet reproduce table4`" in seen.out
    assert "figure6: figure6 needs records of features: run `dcnet train --recipe features" in seen.out
    assert [file.name for file in (tmp_path / "drawn").iterdir()] == ["figure3.png"]


def test_convergence_is_drawn_from_the_records_of_this_repository(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results"
    words = ("reproduce", "figure4", "--runs", tmp_path, "--records", results, "--out", tmp_path)
    assert told(capsys, *words, "--status")[1].out == "figure4: can be drawn\n"
    assert not (tmp_path / "figure4.png").exists()
    assert told(capsys, *words)[0] == 0
    assert (tmp_path / "figure4.png").stat().st_size > 10_000


def figure1(folder: Path, records: Path, capsys) -> str:
    """What is said of it, with records in that folder."""
    code, seen = told(capsys, "reproduce", "figure1", "--runs", folder, "--records", records, "--out", folder)
    assert code == 0
    return seen.out


def test_features_are_found_wherever_their_records_lie(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results"
    assert figure1(tmp_path, results / "features", capsys) == f"figure1: {tmp_path / 'figure1.png'}\n"


@pytest.mark.parametrize("other", ["[1]", '{"half": ', '{"some": "thing"}'])
def test_what_is_no_record_of_features_is_left_alone(other, tmp_path, capsys):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "other.json").write_text(other)
    assert "figure1 needs records of features" in figure1(tmp_path, tmp_path, capsys)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"config": None}, "it is not as it should be: TypeError"),
        ({"points": [[1.0]]}, "its points must have 2 numbers each, or 3 each, but number 0 has 1"),
    ],
)
def test_damaged_features_are_named_in_one_sentence(changes, problem, tmp_path, capsys):
    file = next((Path(__file__).parents[2] / "results" / "features").glob("mnist-cnn9-small-conv-softmax-seed0-*.json"))
    (tmp_path / "some.json").write_text(json.dumps(json.loads(file.read_text()) | changes))
    said = f"figure1: the features of the record 'some' cannot be drawn: {problem}"
    assert figure1(tmp_path, tmp_path, capsys).startswith(said)


def test_a_damaged_record_counts_as_none(tmp_path, capsys):
    config = chosen(["table1"])[0].cells[0].config
    folder = tmp_path / f"{config.name}-{config.hash}"
    folder.mkdir()
    (folder / "record.json").write_text('{"half": ')
    code, seen = told(capsys, "reproduce", "table1", "--status", "--runs", tmp_path)
    assert code == 0
    assert "table1: 0 of 6 cells are there" in seen.out
