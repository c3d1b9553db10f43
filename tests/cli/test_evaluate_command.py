"""`dcnet evaluate`: accuracy in total and per class, compared with the record."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cli_runs import answer, call, color_run, complaint, trained

from dcnet.data import load_dataset
from dcnet.files import write_json
from dcnet.training import Run, load_model
from dcnet.training.tensor_files import read_tensors, write_tensors

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "copied"))


def test_evaluation_equals_the_record(capsys: Capture, run: Run):
    found, recorded = answer(capsys, "evaluate", run.folder, "--device", "cpu"), run.record().results
    assert found["record"] == {"test_accuracy": recorded.test_accuracy, "equal": True}
    assert found["accuracy"] == pytest.approx(recorded.test_accuracy)
    assert found["error"] == pytest.approx(recorded.test_error)
    assert found["loss"] == pytest.approx(recorded.test_loss, rel=1e-5)
    assert (found["run"], found["dataset"], found["images"]) == ("copied", "digits", 1197)


def test_classes_are_evaluated_separately_and_sorted_by_accuracy(capsys: Capture, run: Run):
    found = answer(capsys, "evaluate", run.folder, "--device", "cpu")
    test, (model, _) = load_dataset("digits").test, load_model(run)
    with torch.no_grad():
        predicted = model(test.images.float() / 255).argmax(1)
    expected = {str(i): 100 * (predicted[test.labels == i] == i).double().mean().item() for i in range(10)}
    assert {row["class"]: row["accuracy"] for row in found["classes"]} == pytest.approx(expected)
    assert sum(row["images"] for row in found["classes"]) == 1197
    accuracies = [row["accuracy"] for row in found["classes"]]
    assert accuracies == sorted(accuracies)
    assert len(set(accuracies)) > 3


def test_evaluate_prints_all_numbers_and_five_classes(capsys: Capture, run: Run):
    assert call("evaluate", run.folder, "--device", "cpu") == 0
    text = capsys.readouterr().out
    recorded = run.record().results
    assert (
        f"accuracy {recorded.test_accuracy:.2f} %, error {recorded.test_error:.2f} %, loss {recorded.test_loss:.4f}"
        in text
    )
    assert "equal to the record" in text
    assert "lowest accuracy: 5 of 10 classes" in text


def test_evaluation_of_changed_weights_differs_from_the_record(capsys: Capture, run: Run):
    tensors, notes = read_tensors(run.model_file)
    write_tensors(run.model_file, {name: value * -1.0 for name, value in tensors.items()}, notes)
    assert call("evaluate", run.folder, "--device", "cpu") == 0
    accuracy = run.record().results.test_accuracy
    assert f"the record has {accuracy:.2f} %, a difference of" in capsys.readouterr().out


def test_evaluation_uses_the_precision_of_the_run(capsys: Capture, run: Run):
    record = run.record()
    record.config["precision"] = "bfloat16"
    run.write(record)
    found, recorded = answer(capsys, "evaluate", run.folder, "--device", "cpu"), record.results
    assert found["loss"] == pytest.approx(recorded.test_loss, rel=0.1)
    assert found["loss"] != pytest.approx(recorded.test_loss, rel=1e-5)


def test_folder_of_images_is_preprocessed_as_in_training(capsys: Capture, tmp_path: Path):
    run, images = color_run(tmp_path / "run", tmp_path / "images"), tmp_path / "images"
    options = ("--data-dir", images, "--workers", "0", "--device", "cpu")
    found = answer(capsys, "evaluate", run.folder, *options)
    assert found["images"] == 6
    assert found["record"] is None
    assert {row["class"] for row in found["classes"]} == {"dark", "light"}
    (images / "val" / "dark" / "1.png").write_bytes(b"no image")
    assert "cannot be read as an image" in complaint(capsys, "evaluate", run.folder, *options)


def test_data_with_other_classes_are_rejected(capsys: Capture, tmp_path: Path):
    run, images = color_run(tmp_path / "run", tmp_path / "images"), tmp_path / "images"
    for part in ("train", "val"):
        (images / part / "dark").rename(images / part / "dim")
    message = complaint(capsys, "evaluate", run.folder, "--data-dir", images, "--device", "cpu")
    assert "imagefolder has 2 classes (dim, light), but the run was trained on 2 (dark, light)" in message
    assert "imagefolder is not in" in complaint(capsys, "evaluate", run.folder, "--data-dir", tmp_path)


def test_wrong_input_gives_a_one_line_error(capsys: Capture, run: Run):
    assert "--workers must be 0 or more, not -1" in complaint(capsys, "evaluate", run.folder, "--workers", "-1")
    record = run.record().to_json()
    write_json(run.record_file, record | {"config": record["config"] | {"model": None}})
    assert "is not a record of a run: 'model' in its config has an invalid value, None" in complaint(
        capsys, "evaluate", run.folder
    )
    del record["data"]
    run.record_file.write_text(json.dumps(record))
    assert "does not describe its network: it lacks data.classes" in complaint(capsys, "evaluate", run.folder)
    run.record_file.write_text("{")
    assert "is not a record of a run" in complaint(capsys, "evaluate", run.folder)
