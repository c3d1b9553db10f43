"""What is found of a trained network later is kept in its record."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcnet.training import Run, add_evaluation, recipe
from dcnet.training.records import CURVES


def run_with(folder: Path, status: str) -> Run:
    run = Run(folder)
    config, curves = recipe("digits").described(), {name: [] for name in CURVES}
    run.write({"config": config, "status": status, "curves": curves, "results": {"test_accuracy": 98.0}})
    return run


@pytest.mark.parametrize("status", ["done", "converted"])
def test_evaluations_are_added_by_name(status: str, tmp_path: Path):
    run = run_with(tmp_path / "run", status)
    before = run.record()
    add_evaluation(run, "faces", {"auc": 0.5})
    add_evaluation(run, "open-set", {"auc": 0.7, "open": [{"tpir": None}]})
    add_evaluation(run, "faces", {"auc": 0.6})
    found = run.record()
    assert found.pop("evaluations") == {"faces": {"auc": 0.6}, "open-set": {"auc": 0.7, "open": [{"tpir": None}]}}
    assert found == before


def test_nothing_is_lost_where_several_add_at_once(tmp_path: Path):
    run = run_with(tmp_path / "run", "done")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: add_evaluation(run, f"number {number}", {"value": number}), range(24)))
    assert run.record()["evaluations"] == {f"number {number}": {"value": number} for number in range(24)}


def test_what_cannot_be_kept_leaves_the_record_as_it_is(tmp_path: Path):
    run = run_with(tmp_path / "run", "done")
    before = run.record_file.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        add_evaluation(run, "faces", {"auc": float("nan")})
    with pytest.raises(ValueError, match="needs a name"):
        add_evaluation(run, "", {})
    assert run.record_file.read_bytes() == before
    with pytest.raises(ValueError, match="there is no record at"):
        add_evaluation(Run(tmp_path / "none"), "faces", {})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged"])
def test_a_run_that_is_not_over_has_nothing_to_evaluate(status: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"the run 'run' has nothing to evaluate: its status is '{status}'"):
        add_evaluation(run_with(tmp_path / "run", status), "faces", {})
