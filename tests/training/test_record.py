"""Records: JSON round trips, paths, and problems of damaged records."""

import json
from pathlib import Path

import pytest

from dcnet.training import Record, read_record
from dcnet.training.record import Curves, Point, file_problem, record_problem, write_record

RESULTS = Path(__file__).parents[2] / "results"
FILES = [file for file in sorted(RESULTS.rglob("*.json")) if '"curves"' in file.read_text(encoding="utf-8")]


def test_all_results_are_read_and_written_unchanged(tmp_path: Path):
    assert len(FILES) > 160
    for file in FILES:
        values, record = json.loads(file.read_text(encoding="utf-8")), read_record(file)
        assert record.to_json() == values, file
        write_record(tmp_path / "record.json", record)
        assert read_record(tmp_path / "record.json") == record
        assert len(record.curves) == len(values["curves"]["step"])
        assert record.results is not None
        assert record.results.test_error == values["results"]["test_error"]
        assert record.run_name == f"{values['name']}-{values['hash']}"
        assert record.run_config().operator == record.settings["operator"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"results": None, "command": None, "evaluations": {}, "data": {}, "timings": {"total": None}},
        {"results": {"test_error": 1.0, "top_5": 2.0}, "later": [1, {"a": None}], "steps": None},
        {"evaluations": {"attack": {"settings": {}, "results": None, "verdict": {"words": []}}, "none": {}}},
        {"data": {"name": "digits", "skipped": [], "later": 1}, "curves": {"step": [1], "test_accuracy": [None]}},
        {"resumed_at": [], "weights": None, "execution": {"device": "cpu"}},
    ],
)
def test_unknown_names_nulls_and_missing_values_are_kept(more: dict[str, object]):
    values = {"config": {"operator": "conv", "later": 1}, "status": "done", "curves": {}, **more}
    assert record_problem(values) is None
    assert Record.from_json(values).to_json() == values


def test_value_returns_the_value_at_a_path():
    values = {"evaluations": {"faces": {"auc": 0.5, "ranks": [0.25]}}, "results": {"test_error": 2.0}}
    record = Record.from_json({"config": {}, "status": "done", "curves": {}, **values})
    assert record.value(("evaluations", "faces", "ranks", 0)) == 0.25
    assert record.value(("results", "test_error")) == 2.0
    for missing in (("evaluations", "open-set", "auc"), ("evaluations", "faces", "ranks", 1), ("results", "x", "y")):
        assert record.value(missing) is None


def test_values_that_are_not_finite_are_null_in_the_curves():
    curves = Curves()
    point = Point(step=3, epoch=1.0, learning_rate=0.1, train_loss=1.0, train_accuracy=5.0, test_loss=float("nan"),
                  test_accuracy=6.0, seconds=0.5)  # fmt: skip
    curves.add(point)
    given = {name: [value] for name, value in vars(point).items() if name != "refreshed_accuracy"}
    assert curves.to_json() == {**given, "test_loss": [None]}


def test_file_problem_reports_damaged_records_and_invalid_json(tmp_path: Path):
    file = tmp_path / "some.json"
    for text, problem in {
        "{": "Expecting property name",
        "[1]": None,
        '{"benchmark": "layers"}': None,
        '{"config": {}, "status": "done", "curves": {"step": 1}}': "'curves.step' is 1: expected numbers",
        '{"config": {}, "status": "done", "curves": {}, "weights": 3}': "'weights' is 3: expected an object",
        '{"config": {}, "status": "done", "curves": {}}': None,
    }.items():
        file.write_text(text)
        found = file_problem(file)
        assert found is None if problem is None else found is not None and problem in found


WHOLE = '"config": {}, "curves": {}, "status": "done"'
DAMAGED = [f'{{{WHOLE}, "{part}": 3}}' for part in ("data", "environment", "evaluations", "results", "timings")]
DAMAGED += [f'{{{WHOLE}, "results": {{"test_loss": {word}}}}}' for word in ("NaN", "Infinity", "-Infinity")]


@pytest.mark.parametrize("content", ["", "[]", '{"config": 1}', "{", *DAMAGED])
def test_files_that_are_not_records_raise_an_error(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="is not a record of a run"):
        read_record(tmp_path)
