"""`dcnet convert`: a new run with another operator, and ONNX files with the same outputs as torch."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.cli_runs import answer, call, color_run, complaint, root, trained
from helpers.docs_pages import ROOT, blocks
from PIL import Image

from dcnet.layers import Decoupled
from dcnet.training import Run, find_run, load_model, recipe
from dcnet.training.build import build_model, load_run_weights_
from dcnet.training.conversion import Source
from dcnet.training.tensor_files import read_tensors, write_tensors

Capture = pytest.CaptureFixture[str]


def test_conversion_to_another_operator_keeps_the_weights_in_a_new_run(capsys: Capture, tmp_path: Path):
    source, out = trained()["tanh-cos"], tmp_path / "ball"
    assert answer(capsys, "convert", source.folder, "--operator", "ball-cos", "--out", out)["operator"] == "ball-cos"
    (model, record), (before, _) = load_model(Run(out)), load_model(source)
    assert {str(layer.operator) for layer in model.modules() if isinstance(layer, Decoupled)} == {"ball-cos"}
    for name, value in before.state_dict().items():
        # The statistics are of another operator; training starts them again.
        expected = torch.zeros_like(value) if name.endswith("norm.num_batches_tracked") else value
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=0)
    assert record.status == "converted"
    assert record.results is None
    assert not record.curves
    assert record.config["operator"] == "ball-cos"
    assert record.extra["converted_from"]["hash"] == source.record().hash
    assert find_run("ball", tmp_path).folder == out


def test_converted_run_can_be_evaluated_and_trained(capsys: Capture, tmp_path: Path):
    assert call("convert", trained()["tanh-cos"].folder, "--operator", "conv", "--out", tmp_path / "plain") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"wrote {tmp_path / 'plain'}\n")
    assert f"evaluate the accuracy:\n  dcnet evaluate {tmp_path / 'plain'}" in text
    assert answer(capsys, "evaluate", tmp_path / "plain", "--device", "cpu")["record"] is None
    model = build_model(recipe("digits", width=0.25, operator="conv"), 10, 1, 8)
    assert load_run_weights_(model, str(tmp_path / "plain")) == []
    assert "has no curves: its status is 'converted'" in complaint(capsys, "plot", "curves", tmp_path / "plain")


def test_new_run_is_written_beside_its_source_under_a_unique_name(capsys: Capture, tmp_path: Path):
    source = Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / trained()["tanh-cos"].folder.name))
    shutil.copytree(trained()["conv"].folder, tmp_path / trained()["conv"].folder.name)
    out = Path(answer(capsys, "convert", source.folder, "--operator", "conv")["out"])
    assert out.parent == tmp_path
    assert out.name.startswith("converted-digits-cnn9-small-conv-seed0-")
    for run in tmp_path.iterdir():
        assert find_run(run.name[-8:], tmp_path).folder == run
        assert find_run(run.name, tmp_path).folder == run
    assert "exists already" in complaint(capsys, "convert", source.folder, "--operator", "conv")


def test_radius_plot_of_a_plain_network_gives_the_reason(capsys: Capture, tmp_path: Path):
    found = answer(capsys, "convert", trained()["conv"].folder, "--operator", "tanh-cos", "--out", tmp_path / "new")
    assert "network.body.conv1.layer1.conv.radius" in found["new"]
    # Radius, mean norm and number of batches of each of ten layers.
    assert len(found["new"]) == 30
    message = complaint(capsys, "convert", tmp_path / "new", "--onnx", tmp_path / "new.onnx")
    assert "'new' was converted but not trained: train it first" in message
    assert not (tmp_path / "new.onnx").exists()


def test_calibrated_conversion_keeps_the_outputs_of_the_plain_network(capsys: Capture, tmp_path: Path):
    accuracies, printed = {}, {}
    for start in ("as-is", "calibrated"):
        options = ("--operator", "tanh-cos", "--start", start, "--out", tmp_path / start)
        assert call("convert", trained()["conv"].folder, *options) == 0
        printed[start] = capsys.readouterr().out
        accuracies[start] = answer(capsys, "evaluate", tmp_path / start, "--device", "cpu")["accuracy"]
    plain = trained()["conv"].record().results.test_accuracy
    assert accuracies["calibrated"] > plain - 15
    assert accuracies["as-is"] < plain - 30
    spec = Run(tmp_path / "calibrated").record().config["operator"]
    assert printed["as-is"].count("--operators") == 0
    assert f"train with --operators '{spec}'" in printed["calibrated"]
    assert spec == "tanh(scale=Learnable(per_channel=True))-cos"


def test_convert_accepts_a_checkpoint(capsys: Capture, tmp_path: Path):
    run = Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "half"))
    tensors, notes = read_tensors(run.model_file)
    name = "model.network.classifier.weight"
    tensors |= {name: tensors[name] + 1, "optimizer.a.step": torch.ones(1), "meter.step": torch.ones(1)}
    checkpoint = run.checkpoints.save(7, tensors, notes)
    assert torch.equal(Source.find(str(checkpoint), tmp_path).model().network.classifier.weight, tensors[name])
    run.model_file.unlink()
    assert "there are no weights at" in complaint(capsys, "convert", run.folder, "--operator", "conv")
    answer(capsys, "convert", checkpoint, "--operator", "conv", "--out", tmp_path / "plain")
    assert torch.equal(read_tensors(tmp_path / "plain" / "model.safetensors")[0][name], tensors[name])


def test_onnx_is_compared_with_torch(capsys: Capture, tmp_path: Path):
    source, out = trained()["tanh-cos"], tmp_path / "new" / "digits.onnx"
    found = answer(capsys, "convert", source.folder, "--onnx", out)
    assert found["bytes"] == out.stat().st_size
    assert 0 <= found["largest_difference"] < 1e-4 * found["largest_logit"]
    pixels = np.random.default_rng(1).random((5, 1, 8, 8), np.float32)
    (logits,) = onnxruntime.InferenceSession(out).run(None, {"input": pixels})
    with torch.no_grad():
        expected = load_model(source)[0](torch.from_numpy(pixels))
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gray", "color"])
def test_onnx_file_has_the_metadata_to_predict(
    kind: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Reads the file with the code of docs/inference.md; the image is large and not square."""
    monkeypatch.chdir(tmp_path)
    run = trained()["tanh-cos"] if kind == "gray" else color_run(tmp_path / "run", tmp_path / "images")
    noise = np.random.default_rng(0).integers(0, 255, (7, 5, 3), np.uint8)
    Image.fromarray(noise).resize((45, 63)).save("photo.jpg")
    answer(capsys, "convert", run.folder, "--onnx", "network.onnx")
    ((found,), names) = answer(capsys, "predict", run.folder, "photo.jpg", "--top", "2"), {}
    exec(onnx_block(), names)
    assert names["classes"] == run.record().data.classes
    for best in found["classes"]:
        assert names["probabilities"][best["index"]] == pytest.approx(best["probability"], rel=1e-3)
    assert capsys.readouterr().out.startswith(f"{found['classes'][0]['class']}: ")
    about = onnxruntime.InferenceSession("network.onnx").get_modelmeta().custom_metadata_map
    assert about["operator"] == run.record().config["operator"]
    assert json.loads(about["preprocessing"])["channel_order"] == (["L"] if kind == "gray" else ["R", "G", "B"])
    assert json.loads(about["preprocessing"])["normalization_in_network"] == {"mean": [0.0], "std": [1.0]}


def onnx_block() -> str:
    """The code of the docs that reads an ONNX file."""
    (code,) = (block.code for block in blocks(ROOT / "docs" / "inference.md", "python") if "network.onnx" in block.code)
    return code


def test_onnx_file_with_other_outputs_gives_a_one_line_error(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def differ(*_: object, **__: object) -> None:
        raise ArithmeticError("output 0 of the ONNX model differs")

    monkeypatch.setattr("dcnet.report.evaluation_report.export_onnx", differ)
    assert call("convert", trained()["conv"].folder, "--onnx", tmp_path / "a.onnx") == 1
    assert capsys.readouterr().err == "dcnet convert: output 0 of the ONNX model differs\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --operator, the new operator, or --onnx, the file to write"),
        (["--operator", "conv", "--onnx", "a.onnx"], "give either --operator"),
        (["--operator", "tanh-cos"], "the run already has the operator 'tanh-cos'"),
        (["--operator", "tnh-cos"], "unknown magnitude 'tnh'"),
        (["--operator", "ball-cos", "--start", "calibrated"], "not from 'tanh-cos' to 'ball-cos'"),
        (["--onnx", "a.txt"], "--onnx must be a file such as .onnx, not 'a.txt'"),
        (["--onnx", "a.onnx", "--out", "b"], "--out needs --operator, and cannot be used with --onnx 'a.onnx'"),
    ],
)
def test_wrong_options_are_rejected(options: list[str], message: str, capsys: Capture):
    assert message in complaint(capsys, "convert", "digits-cnn9-small-tanh-cos", *options, "--runs", root())


def test_files_that_are_not_weights_of_a_run_are_rejected(capsys: Capture, tmp_path: Path):
    alone = tmp_path / "alone.safetensors"
    write_tensors(alone, {"a": torch.ones(1)}, {})
    assert "there is no record at" in complaint(capsys, "convert", alone, "--operator", "conv")
    run = Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "run"))
    write_tensors(run.model_file, {"a": torch.ones(1)}, {})
    assert "give a run of the same structure" in complaint(capsys, "convert", run.folder, "--operator", "conv")
    run.model_file.write_bytes(b"no tensors")
    assert "is not a whole file of tensors" in complaint(capsys, "convert", run.folder, "--onnx", tmp_path / "a.onnx")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    message = complaint(capsys, "convert", trained()["conv"].folder, "--operator", "ball-cos", "--out", full)
    assert "exists already" in message
