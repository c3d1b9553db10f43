"""`dcnet plot`: pictures in the given file or in the folder of the run, and one-line errors."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.cli_runs import call, complaint, root, trained

PNG = b"\x89PNG"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A writable copy of a run."""
    return shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "runs" / "copied")


def test_operators_plot_is_written_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(tmp_path)
    assert call("plot", "operators") == 0
    assert capsys.readouterr().out == "wrote operators.png\n"
    assert Path("operators.png").read_bytes().startswith(PNG)


def test_operators_plot_draws_the_given_operators(tmp_path: Path):
    out = tmp_path / "new" / "some.svg"
    assert call("plot", "operators", "--operators", "conv", "seg(slope=0.2)-sqcos+product", "--out", out) == 0
    assert "seg(slope=0.2)+product" in out.read_text()
    assert "sqcos" in out.read_text()


@pytest.mark.parametrize("kind", ["curves", "filters", "radius"])
def test_picture_is_written_to_the_folder_of_its_run(kind: str, run: Path, capsys: Capture):
    assert call("plot", kind, "copied", "--runs", run.parent) == 0
    assert capsys.readouterr().out == f"wrote {run / kind}.png\n"
    assert (run / f"{kind}.png").read_bytes().startswith(PNG)


def test_curves_of_several_runs_have_their_operators_as_labels(tmp_path: Path):
    out = tmp_path / "curves.svg"
    assert (
        call("plot", "curves", *(run.folder for run in trained().values()), "--out", out, "--metric", "accuracy") == 0
    )
    text = out.read_text()
    for words in ("tanh-cos", "conv", "test accuracy, %", "training loss", "learning rate", "digits, cnn9-small"):
        assert f"<!-- {words} -->" in text


def test_filters_of_another_layer(tmp_path: Path):
    for name in ("body.conv2.layer1.conv", "network.body.conv2.layer1.conv"):
        out = tmp_path / f"{name}.svg"
        assert call("plot", "filters", trained()["conv"].folder, "--layer", name, "--out", out) == 0
        assert "by 8 channels" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["operators", "--operators", "tnh-cos"], "unknown magnitude 'tnh'"),
        (["operators", "--out", "a.pdf"], "--out must be a file such as .png or .svg, not 'a.pdf'"),
        (["curves"], "give one or more runs"),
        (["curves", "nothing-of-that-name"], "there is no run 'nothing-of-that-name'"),
        (["curves", "digits"], "'digits' is ambiguous, it matches 2 runs"),
        (
            ["filters", "digits-cnn9-small-conv", "--layer", "conv9"],
            "--layer must be a convolution of the network, not 'conv9'",
        ),
        (["filters", "digits-cnn9-small-conv", "--out", "a"], "--out must be a file such as .png or .svg, not 'a'"),
        (["radius", "digits-cnn9-small-conv"], "a plain network has no radius"),
    ],
)
def test_undrawable_records_give_a_one_line_error(arguments: list[str], message: str, capsys: Capture):
    runs = [] if arguments[0] == "operators" else ["--runs", root()]
    assert message in complaint(capsys, "plot", *arguments, *runs)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("curves", "test_accuracy", None),
        ("curves", "test_accuracy", [1.0]),
        ("curves", "train_loss", "low"),
        ("curves", "learning_rate", None),
        ("config", "schedule", None),
        ("config", "operator", None),
    ],
)
def test_damaged_record_gives_a_one_line_error(run: Path, capsys: Capture, place: str, name: str, value: object):
    record = json.loads((run / "record.json").read_text())
    record[place][name] = value
    (run / "record.json").write_text(json.dumps(record))
    assert "record.json' is not a record of a run: " in complaint(capsys, "plot", "curves", run)
    assert not (run / "curves.png").exists()
    (run / "record.json").write_text(json.dumps(record | {place: None}))
    assert "is not a record of a run" in complaint(capsys, "plot", "curves", run)


def test_run_without_curves_or_weights_is_rejected(run: Path, capsys: Capture):
    (run / "model.safetensors").unlink()
    message = complaint(capsys, "plot", "filters", run)
    assert "is done, but its weights are missing: there is no" in message
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(record | {"status": "running"}))
    message = complaint(capsys, "plot", "filters", run)
    assert f"has no weights yet: its status is 'running'; `dcnet train --resume {run}` resumes it" in message
    (run / "record.json").write_text(json.dumps(record | {"status": "diverged"}))
    assert complaint(capsys, "plot", "filters", run).strip().endswith("its status is 'diverged'")
    (run / "record.json").write_text('{"config": {}, "status": "running", "curves": {}}')
    assert "has no curves: its status is 'running'" in complaint(capsys, "plot", "curves", run)
    (run / "model.safetensors").touch()
    assert "does not describe its network" in complaint(capsys, "plot", "radius", run)


def test_damaged_weights_are_rejected(run: Path, capsys: Capture):
    weights = run / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert "is damaged" in complaint(capsys, "plot", "radius", run)
