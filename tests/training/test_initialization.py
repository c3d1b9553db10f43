"""Initialization: pretrained weights, calibration, and running statistics."""

import dataclasses
import json
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.packages import timm_or_skip
from helpers.small_runs import tiny, train
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import dcnet
from dcnet.cli.app import main
from dcnet.data import load_dataset
from dcnet.layers import Decoupled
from dcnet.training import Execution, Run, Trainer, load_model, recipe
from dcnet.training.initialization import (
    build_pretrained,
    fingerprint,
    init_batch_norm_,
    read_weights,
    refreshed_statistics,
    reset_batch_norm_,
)

timm = timm_or_skip()

NETWORK = "test_resnet"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: images of three classes, and the weights of a network of five classes."""
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


def finetune(*options: str) -> int:
    words = ["--data-dir", "photos", "--image-size", "32", "--epochs", "1", "--batch-size", "6", "--workers", "0"]
    return main(["train", "--recipe", "finetune", "--model", f"timm:{NETWORK}", *words, "--device", "cpu", *options])


def started(**changes: object) -> tuple[torch.nn.Module, str]:
    options = {"model": f"timm:{NETWORK}", "weights": "weights.safetensors", "image_size": 32} | changes
    config = recipe("finetune", **options)
    model, loaded = build_pretrained(config, load_dataset("imagefolder", Path("photos")), config.image_size or 0, CPU)
    return model.eval(), str(loaded)


def test_the_command_line_finetunes_a_pretrained_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune("--weights", "weights.safetensors") == 0
    output = capsys.readouterr().out
    sums = fingerprint(folder / "weights.safetensors")
    line = (
        f"90 tensors from weights.safetensors (sha256 {sums[:12]}); new: the classifier (the file has one of 5 classes)"
    )
    assert f"{line}; 12 layers are decoupled and calibrated\n" in output
    (run,) = (Run(path) for path in (folder / "runs").iterdir())
    record = run.record()
    assert record.weights["sha256"] == sums
    assert record.weights["file"] == "weights.safetensors"
    assert record.config["operator"] == "tanh-cos"
    assert record.config["pixel_mean"] == [0.5, 0.5, 0.5]
    model, _ = load_model(run)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    # The same command reports that the run is done, or that the file has changed.
    assert finetune("--weights", "weights.safetensors") == 0
    save_file(network(classes=4).state_dict(), folder / "weights.safetensors")
    assert finetune("--weights", "weights.safetensors") == 2
    assert "is done, but 'weights.safetensors' has changed: its sha256 was" in capsys.readouterr().err


def test_an_interrupted_run_keeps_the_description_of_its_weights(folder: Path) -> None:
    config = recipe("finetune", model=f"timm:{NETWORK}", weights="weights.safetensors", image_size=32, steps=2)
    config = dataclasses.replace(config, batch_size=4)
    run = Run.of(config, folder / "runs")
    execution = Execution(device="cpu", data_dir=folder / "photos", workers=0)
    first = Trainer(config, run, execution)
    first.setup.train_step(0, [])
    first.done = 1
    first.save()
    (folder / "weights.safetensors").unlink()
    again = Trainer(config, run, execution)
    record = again.run()
    assert again.started_at == 1
    assert record.weights == first.record.weights


def test_a_plain_network_has_the_outputs_of_timm(folder: Path) -> None:
    """Including the classifier, which has the same number of classes."""
    save_file(network(classes=3).state_dict(), folder / "three.safetensors")
    model, output = started(operator="conv", weights="three.safetensors")
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(model(x), network(classes=3)((x - 0.5) / 0.5), atol=1e-5)
    assert output.endswith("; including the classifier of 3 classes")


def test_a_decoupled_network_starts_calibrated(folder: Path) -> None:
    """The features have about the norm and direction of those of the plain network."""
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


def test_a_vision_transformer_uses_the_image_size_of_the_config(folder: Path) -> None:
    save_file(network("test_vit").state_dict(), folder / "vit.safetensors")
    model, output = started(model="timm:test_vit", weights="vit.safetensors", image_size=48)
    assert model(torch.rand(1, 3, 48, 48)).shape == (1, 3)
    assert "1 layer is decoupled and calibrated" in output


def test_gray_images_use_the_sum_of_the_color_filters(folder: Path) -> None:
    config = recipe(
        "finetune", model=f"timm:{NETWORK}", weights="weights.safetensors", dataset="digits", operator="conv"
    )
    model, _ = build_pretrained(dataclasses.replace(config, image_size=None), load_dataset("digits"), 8, CPU)
    first = next(layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d))
    known = next(layer for layer in network().modules() if isinstance(layer, torch.nn.Conv2d))
    assert torch.allclose(first.weight, known.weight.sum(1, keepdim=True), atol=1e-6)
    assert model.mean.flatten().tolist() == [0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "none.safetensors"], "there is no file 'none.safetensors'"),
        (["--weights", "photos"], "there is no file 'photos'"),
        (["--weights", "other.safetensors"], "the weights do not fit 'timm:test_resnet': Missing key(s)"),
        (["--weights", "torn.safetensors"], "'torn.safetensors' is not a whole file of tensors"),
        (
            ["--weights", "code.pth"],
            "'code.pth' has objects other than tensors, which are not loaded",
        ),
        (["--weights", "packed.pth"], "'packed.pth' is neither .safetensors nor a file of a current torch.save"),
        (["--weights", "old.pth"], "'old.pth' is neither .safetensors nor a file of a current torch.save"),
        (["--weights", "list.pth"], "'list.pth' has no tensors by name"),
        (
            ["--weights", "weights.safetensors", "--model", "cnn9"],
            "weights='weights.safetensors' need a timm network",
        ),
        (["--weights", "weights.safetensors", "--pretrained", "photos"], "exclude each other: give one"),
        (["--weights", "weights.safetensors", "--operators", "sharp-cos"], "'sharp-cos' cannot be calibrated"),
        (["--weights", "weights.safetensors", "--model", "timm:test_resne"], "unknown timm network 'test_resne'"),
        (["--weights", "vit.safetensors", "--model", "timm:test_vit", "--image-size", "8"], "of 8 x 8 pixels: "),
    ],
)
def test_unusable_weights_raise_one_sentence(
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
    assert finetune(*options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists() or not any((folder / "runs").glob("*/record.json"))


def test_files_of_torch_save_load_tensors_only(folder: Path) -> None:
    tensors = network().state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in tensors.items()}}, folder / "weights.pth")
    found = read_weights(folder / "weights.pth")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_a_failed_download_of_timm_weights_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("dcnet.models.timm_models.own_file", lambda name: None)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.delenv(variable, raising=False)
    assert finetune("--weights", "timm") == 2
    error = capsys.readouterr().err
    assert "timm's weights of 'test_resnet' are not in its cache and cannot be downloaded: " in error
    assert error.endswith("; give a .safetensors file instead of 'timm'\n")
    assert error.count("\n") == 1


def test_timm_weights_come_from_its_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = folder / "cache" / "model.safetensors"
    cached.parent.mkdir()
    save_file(network(classes=1000).state_dict(), cached)
    monkeypatch.setattr("dcnet.models.timm_models.own_file", lambda name: cached)
    monkeypatch.setattr("dcnet.training.initialization.own_file", lambda name: cached)
    tensors = network(classes=1000).state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(tensors))
    assert finetune("--weights", "timm", "--json") == 0
    output = capsys.readouterr()
    assert f"90 tensors from model.safetensors (sha256 {fingerprint(cached)[:12]})" in output.err
    assert json.loads(output.out)[0]["status"] == "done"


def test_weights_of_a_run_raise_an_error_that_names_pretrained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune("--weights", "weights.safetensors", "--operators", "conv") == 0
    capsys.readouterr()
    (run,) = (Run(path) for path in (folder / "runs").iterdir())
    assert finetune("--weights", str(run.model_file), "--operators", "conv") == 2
    assert "has weights of a dcnet run, not of timm: give it to --pretrained" in capsys.readouterr().err


def test_a_finetuned_network_can_be_converted_and_finetuned_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune("--weights", "weights.safetensors") == 0
    (run,) = (path for path in (folder / "runs").iterdir())
    assert main(["convert", str(run), "--operator", "seg-cos", "--out", "runs/changed"]) == 0
    assert finetune("--operators", "seg-cos", "--pretrained", "runs/changed") == 0
    assert capsys.readouterr().err == ""


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(
        dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.BatchNorm1d(4 * 36, momentum=None),
    )


def test_init_batch_norm_sets_the_statistics_of_the_batch_only():
    model, x = small_network().train(), torch.rand(5, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    init_batch_norm_(model, lambda: model(x))
    with torch.no_grad():
        seen = model[0](x)
    torch.testing.assert_close(model[1].running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(model[1].running_var, seen.var((0, 2, 3)))
    assert (model[1].momentum, model[4].momentum) == (0.1, None)
    changed = ("1.running_mean", "1.running_var")
    for name in ("mean_norm", "num_batches_tracked"):
        model[0].get_buffer(name).copy_(before[f"0.{name}"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in changed), name


def test_a_batch_that_is_not_finite_does_not_change_the_statistics():
    model = small_network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    init_batch_norm_(model, lambda: model(torch.full((5, 3, 8, 8), float("nan"))))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_trained_statistics_are_kept_until_they_are_reset():
    model = small_network().train()
    model(torch.rand(5, 3, 8, 8))
    before = model[1].running_var.clone()
    x = torch.rand(5, 3, 8, 8)
    init_batch_norm_(model, lambda: model(x))
    assert torch.equal(model[1].running_var, before)
    reset_batch_norm_(model)
    init_batch_norm_(model, lambda: model(x))
    assert not torch.allclose(model[1].running_var, before)


def test_an_exception_restores_the_momenta():
    model = small_network().train()

    def look():
        raise KeyboardInterrupt

    try:
        init_batch_norm_(model, look)
    except KeyboardInterrupt:
        assert model[1].momentum == 0.1
    else:
        raise AssertionError


def test_refreshed_statistics_are_means_over_the_batches_and_temporary():
    model, batches = small_network().train(), torch.rand(3, 5, 3, 8, 8)
    model(torch.rand(5, 3, 8, 8))
    patches = [batch.unfold(2, 3, 1).unfold(3, 3, 1) for batch in batches]
    mean_norm = torch.stack([(part.square().sum((1, 4, 5)) + 1e-4).sqrt().mean() for part in patches]).mean()
    with torch.no_grad():
        seen = [model[0](batch) for batch in batches]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refreshed_statistics(model, lambda i: model(batches[i]), 3):
        torch.testing.assert_close(model[0].mean_norm, mean_norm)
        torch.testing.assert_close(model[1].running_mean, torch.stack([y.mean((0, 2, 3)) for y in seen]).mean(0))
        torch.testing.assert_close(model[1].running_var, torch.stack([y.var((0, 2, 3)) for y in seen]).mean(0))
        assert (model[1].momentum, model[4].momentum) == (0.1, None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_statistics_are_restored_after_an_exception():
    model = small_network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), refreshed_statistics(model, lambda i: model(torch.rand(5, 3, 8, 8)), 2):
        raise KeyboardInterrupt
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_network_without_statistics_needs_no_batch():
    def look():
        raise AssertionError

    init_batch_norm_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), look)


def test_a_short_training_is_better_than_chance(tmp_path):
    _, record = train(tiny(train_images=600, batch_size=30, width=0.25, epochs=2), tmp_path)
    assert record.results.test_accuracy > 60
