"""`dcnet plot features`: of runs, of records and as animations, and one-line errors."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.cli_runs import call, complaint
from PIL import Image

from dcnet.report.features import read_features
from dcnet.training import Execution, Run, Trainer, load_model, recipe

SMALL = {"dataset": "digits", "epochs": 2, "train_images": 60, "batch_size": 20, "evaluate_every": 3}
Capture = pytest.CaptureFixture[str]
# Removed at the end of the process.
_folder = tempfile.TemporaryDirectory(prefix="dcnet-features-")


@functools.cache
def small_run() -> Run:
    config = recipe("features", **SMALL, operator="conv")
    run = Run.of(config, Path(_folder.name))
    Trainer(config, run, Execution(device="cpu")).run()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A writable copy of a run."""
    return shutil.copytree(small_run().folder, tmp_path / "runs" / "copied")


def test_features_are_written_to_the_folder_of_their_run(run: Path, capsys: Capture):
    assert call("plot", "features", "copied", "--runs", run.parent) == 0
    assert capsys.readouterr().out == f"wrote {run / 'features.png'}\n"
    assert (run / "features.png").read_bytes().startswith(b"\x89PNG")


def test_records_option_writes_the_features(run: Path, tmp_path: Path):
    out = tmp_path / "features.svg"
    assert call("plot", "features", run, "--records", tmp_path / "records", "--out", out) == 0
    file = tmp_path / "records" / "copied.json"
    record = json.loads(file.read_text())
    model, source = load_model(Run(run))
    assert record["accuracy"] == pytest.approx(source.results.test_accuracy)
    assert record["config"] == source.config
    assert len(record["points"]) == len(record["labels"]) == min(1000, source.data.test_images)
    assert torch.allclose(torch.tensor(record["directions"]), model.network.head.weight, rtol=1e-3)
    assert max(len(str(abs(value)).replace(".", "").lstrip("0")) for row in record["points"] for value in row) <= 4
    assert f"conv, softmax: {source.results.test_accuracy:.2f} %" in out.read_text()


def test_record_of_features_gives_the_same_plot_as_its_run(run: Path, tmp_path: Path):
    files = [tmp_path / "run.svg", tmp_path / "record.svg"]
    assert call("plot", "features", run, "--records", tmp_path / "records", "--out", files[0]) == 0
    record = tmp_path / "records" / "copied.json"
    assert call("plot", "features", record, "--out", files[1]) == 0
    titles = [[line for line in file.read_text().splitlines() if "<!--" in line] for file in files]
    assert titles[0] == titles[1]
    assert read_features(record).points.shape[1] == 2


def test_several_runs_are_drawn_side_by_side(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    shutil.copytree(run, run.parent / "another")
    monkeypatch.chdir(tmp_path)
    assert call("plot", "features", "copied", "another", "--runs", run.parent) == 0
    assert capsys.readouterr().out == "wrote features.png\n"


def test_features_are_animated_over_epochs(run: Path, capsys: Capture):
    assert call("plot", "features", run, "--animate") == 0
    assert capsys.readouterr().out == f"wrote {run / 'features.gif'}\n"
    with Image.open(run / "features.gif") as image:
        assert image.n_frames == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.gif"], "--out must be a file such as .png or .svg, not 'a.gif'"),
        (["--animate", "--out", "a.png"], "--out must be a file such as .gif, not 'a.png'"),
        (["--animate", "--records", "x"], "--animate and --records exclude each other"),
    ],
)
def test_incompatible_options_are_rejected(run: Path, arguments: list[str], message: str, capsys: Capture):
    assert message in complaint(capsys, "plot", "features", run, *arguments)


def test_plot_features_rejects_input_without_features(run: Path, tmp_path: Path, capsys: Capture):
    assert "give one or more runs" in complaint(capsys, "plot", "features")
    config = recipe("digits", steps=1, train_images=20, batch_size=20, width=0.1, operator="conv")
    plain = Run.of(config, tmp_path).folder
    Trainer(config, Run(plain), Execution(device="cpu")).run()
    assert "only 2 or 3 features can be drawn, but conv has 26" in complaint(capsys, "plot", "features", plain)
    assert "has no snapshots of features (its status" in complaint(capsys, "plot", "features", plain, "--animate")
    for text in ("{}", "[]", "no json", '{"kind": "features"}'):
        (tmp_path / "bad.json").write_text(text)
        assert "bad.json' is not a record of features" in complaint(capsys, "plot", "features", tmp_path / "bad.json")
    assert "is not a record of features" in complaint(capsys, "plot", "features", tmp_path / "missing.json")


def test_records_option_rejects_features_read_from_a_record(run: Path, tmp_path: Path, capsys: Capture):
    assert call("plot", "features", run, "--records", tmp_path / "records") == 0
    capsys.readouterr()
    file = tmp_path / "records" / "copied.json"
    assert "--records needs runs" in complaint(capsys, "plot", "features", file, "--records", tmp_path / "more")
