"""Pretrained weights of timm: what is loaded and what is new, a calibrated start, and files that do not fit."""

import dataclasses
import json
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import timm_or_skip
from PIL import Image
from safetensors.torch import save_file

from dcnet.cli.app import main
from dcnet.data import load_dataset
from dcnet.layers import Decoupled
from dcnet.training import Execution, Run, Trainer, load_model, recipe
from dcnet.training.pretrained import fingerprint, read_weights, start_from_weights

timm = timm_or_skip()

NETWORK = "test_resnet"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one is: a folder of images of three classes, and the weights of a network of five classes."""
    random = np.random.default_rng(0)
    for part, name, shade in ((part, name, shade) for part in ("train", "val") for name, shade in SHADES.items()):
        (tmp_path / "photos" / part / name).mkdir(parents=True)
        for i in range(4):
            pixels = (shade + random.integers(0, 50, (36, 40, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DCNET_RUNS", raising=False)
    save_file(network().state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


SHADES = {"cat": 20, "dog": 110, "owl": 200}


def network(name: str = NETWORK, classes: int = 5, **options: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return timm.create_model(name, num_classes=classes, **options).eval()


def train(*options: str) -> int:
    words = ["--data-dir", "photos", "--image-size", "32", "--epochs", "1", "--batch-size", "6", "--workers", "0"]
    return main(["train", "--recipe", "finetune", "--model", f"timm:{NETWORK}", *words, "--device", "cpu", *options])


def started(**changes: object) -> tuple[torch.nn.Module, str]:
    options = {"model": f"timm:{NETWORK}", "weights": "weights.safetensors", "image_size": 32} | changes
    config = recipe("finetune", **options)
    model, loaded = start_from_weights(config, load_dataset("imagefolder", Path("photos")), config.image_size or 0, CPU)
    return model.eval(), str(loaded)


def test_a_pretrained_network_is_tuned_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--weights", "weights.safetensors") == 0
    told = capsys.readouterr().out
    sums = fingerprint(folder / "weights.safetensors")
    line = (
        f"90 tensors from weights.safetensors (sha256 {sums[:12]}); new: the classifier (the file has one of 5 classes)"
    )
    assert f"{line}; 12 layers are decoupled and calibrated\n" in told
    (run,) = (Run(path) for path in (folder / "runs").iterdir())
    record = run.record()
    assert record["weights"]["sha256"] == sums
    assert record["weights"]["file"] == "weights.safetensors"
    assert record["config"]["operator"] == "tanh-cos"
    assert record["config"]["pixel_mean"] == [0.5, 0.5, 0.5]
    model, _ = load_model(run)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    # The same command finds it done, and not any more when the file is another one.
    assert train("--weights", "weights.safetensors") == 0
    save_file(network(classes=4).state_dict(), folder / "weights.safetensors")
    assert train("--weights", "weights.safetensors") == 2
    assert "is done, with another 'weights.safetensors': its sha256 was" in capsys.readouterr().err


def test_an_interrupted_run_keeps_what_it_started_from(folder: Path) -> None:
    config = recipe("finetune", model=f"timm:{NETWORK}", weights="weights.safetensors", image_size=32, steps=2)
    config = dataclasses.replace(config, batch_size=4)
    run = Run.of(config, folder / "runs")
    execution = Execution(device="cpu", data_dir=folder / "photos", workers=0)
    first = Trainer(config, run, execution)
    first.space.train_on(0, [])
    first.done = 1
    first.save()
    (folder / "weights.safetensors").unlink()
    again = Trainer(config, run, execution)
    record = again.run()
    assert again.begun_at == 1
    assert record["weights"] == first.record["weights"]


def test_a_plain_network_answers_as_that_of_timm(folder: Path) -> None:
    """With the classifier, which is of as many classes."""
    save_file(network(classes=3).state_dict(), folder / "three.safetensors")
    model, told = started(operator="conv", weights="three.safetensors")
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(model(x), network(classes=3)((x - 0.5) / 0.5), atol=1e-5)
    assert told.endswith("; the classifier of 3 classes among them")


def test_a_decoupled_network_starts_calibrated(folder: Path) -> None:
    """Its channels are as large as those of the plain one, other than those of a network that starts as it is."""
    loader = load_dataset("imagefolder", folder / "photos").test_loader(12, 32, workers=0)
    images = torch.cat([images for images, _ in loader])
    plain, _ = started(operator="conv")
    model, _ = started()
    sizes = {name: layer.weight.shape for name, layer in model.named_modules() if isinstance(layer, Decoupled)}
    assert len(sizes) == 12
    with torch.no_grad():
        expected, found = plain.features(images), model.features(images)
    assert found.norm() == pytest.approx(expected.norm(), rel=0.5)
    similar = torch.nn.functional.cosine_similarity(expected.flatten(), found.flatten(), 0)
    assert similar > 0.8


def test_a_vision_transformer_takes_the_image_size(folder: Path) -> None:
    save_file(network("test_vit").state_dict(), folder / "vit.safetensors")
    model, told = started(model="timm:test_vit", weights="vit.safetensors", image_size=48)
    assert model(torch.rand(1, 3, 48, 48)).shape == (1, 3)
    assert "1 layer is decoupled and calibrated" in told


def test_grey_images_take_the_sum_of_the_colours(folder: Path) -> None:
    config = recipe(
        "finetune", model=f"timm:{NETWORK}", weights="weights.safetensors", dataset="digits", operator="conv"
    )
    model, _ = start_from_weights(dataclasses.replace(config, image_size=None), load_dataset("digits"), 8, CPU)
    first = next(layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d))
    known = next(layer for layer in network().modules() if isinstance(layer, torch.nn.Conv2d))
    assert torch.allclose(first.weight, known.weight.sum(1, keepdim=True), atol=1e-6)
    assert model.mean.flatten().tolist() == [0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "none.safetensors"], "--weights is 'none.safetensors', and there is no such file: give one in"),
        (["--weights", "photos"], "--weights is 'photos', and there is no such file"),
        (["--weights", "other.safetensors"], "the weights do not fit 'timm:test_resnet': Missing key(s)"),
        (["--weights", "torn.safetensors"], "'torn.safetensors' is not a whole file of tensors"),
        (["--weights", "code.pth"], "'code.pth' holds more than tensors, and is not read: load it where you trust it"),
        (["--weights", "packed.pth"], "'packed.pth' is neither .safetensors nor as torch.save writes it"),
        (["--weights", "old.pth"], "'old.pth' is neither .safetensors nor as torch.save writes it"),
        (["--weights", "list.pth"], "'list.pth' has no tensors by name"),
        (
            ["--weights", "weights.safetensors", "--model", "cnn9"],
            "weights='weights.safetensors' are of a network of timm",
        ),
        (["--weights", "weights.safetensors", "--pretrained", "photos"], "exclude each other: give one"),
        (["--weights", "weights.safetensors", "--operators", "sharp-cos"], "'sharp-cos' cannot be calibrated"),
        (["--weights", "weights.safetensors", "--model", "timm:test_resne"], "unknown timm network 'test_resne'"),
        (["--weights", "vit.safetensors", "--model", "timm:test_vit", "--image-size", "8"], "of 8 x 8 pixels: "),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(2)}, folder / "other.safetensors")
    save_file(network("test_vit").state_dict(), folder / "vit.safetensors")
    (folder / "torn.safetensors").write_bytes((folder / "weights.safetensors").read_bytes()[:-9])
    torch.save({"state_dict": {"a": torch.ones(2)}, "code": socket.socket}, folder / "code.pth")
    torch.save([torch.ones(2)], folder / "list.pth")
    torch.save({"a": torch.ones(2)}, folder / "old.pth", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "packed.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", bytes(9000))
    assert train(*options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists() or not any((folder / "runs").glob("*/record.json"))


def test_files_of_torch_are_read_as_tensors_alone(folder: Path) -> None:
    tensors = network().state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in tensors.items()}}, folder / "weights.pth")
    found = read_weights(folder / "weights.pth")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_without_a_network_the_weights_of_timm_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("dcnet.models.timm_models.own_file", lambda name: None)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.delenv(variable, raising=False)
    assert train("--weights", "timm") == 2
    error = capsys.readouterr().err
    assert "timm's weights of 'test_resnet' are not in its cache and cannot be downloaded: " in error
    assert error.endswith("; give a .safetensors file in place of 'timm'\n")
    assert error.count("\n") == 1


def test_the_weights_of_timm_are_taken_from_its_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = folder / "cache" / "model.safetensors"
    cached.parent.mkdir()
    save_file(network(classes=1000).state_dict(), cached)
    monkeypatch.setattr("dcnet.models.timm_models.own_file", lambda name: cached)
    monkeypatch.setattr("dcnet.training.pretrained.own_file", lambda name: cached)
    tensors = network(classes=1000).state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(tensors))
    assert train("--weights", "timm", "--json") == 0
    told = capsys.readouterr()
    assert f"90 tensors from model.safetensors (sha256 {fingerprint(cached)[:12]})" in told.err
    assert json.loads(told.out)[0]["status"] == "done"


def test_the_weights_of_a_run_are_for_another_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--weights", "weights.safetensors", "--operators", "conv") == 0
    capsys.readouterr()
    (run,) = (Run(path) for path in (folder / "runs").iterdir())
    assert train("--weights", str(run.model_file), "--operators", "conv") == 2
    assert "is of a run of dcnet, not of timm: give it to --pretrained" in capsys.readouterr().err


def test_a_tuned_network_is_converted_and_tuned_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--weights", "weights.safetensors") == 0
    (run,) = (path for path in (folder / "runs").iterdir())
    assert main(["convert", str(run), "--operator", "seg-cos", "--out", "runs/changed"]) == 0
    assert train("--operators", "seg-cos", "--pretrained", "runs/changed") == 0
    assert capsys.readouterr().err == ""
