"""Commands for runs on folders of images, and for runs of custom networks and datasets."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli_runs import call, complaint
from PIL import Image
from torch import nn

from dcnet.data import Dataset, Split, load_dataset
from dcnet.files import write_json
from dcnet.training import Execution, Record, Run, Trainer, all_runs, load_model, recipe
from dcnet.training.recipes import command_of

Capture = pytest.CaptureFixture[str]
SMALL = ["--image-size", "14", "--batch-size", "4", "--width", "0.1", "--epochs", "1", "--device", "cpu"]
SMALL += ["--workers", "0", "--operators", "conv"]


def photos(folder: Path, seed: int = 0) -> Path:
    """Ten images each of two classes, without train and val."""
    chance = np.random.default_rng(seed)
    for shade, name in ((40, "cat"), (160, "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            pixels = (shade + chance.integers(0, 60, (16, 18, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def train(tmp_path: Path, *more: Any) -> int:
    return call("train", "--dataset", "imagefolder", *SMALL, "--runs", tmp_path / "runs", *more)


def only_run(tmp_path: Path) -> Run:
    (run,) = all_runs(tmp_path / "runs")
    return run


def test_folder_without_a_test_set_is_split_and_the_split_is_reported(tmp_path: Path, capsys: Capture):
    folder = photos(tmp_path / "photos")
    assert train(tmp_path, "--data-dir", folder, "--seeds", "0", "1") == 0
    message = (
        f"{folder} has no folders train and val: 20 % of each class is held out for testing, always the same images "
        "(16 to train, 4 to test)"
    )
    assert capsys.readouterr().out.count(message) == 1
    for run in all_runs(tmp_path / "runs"):
        data = run.record().data
        assert (data.folder, data.held_out, data.train_images, data.test_images) == (str(folder), 0.2, 16, 4)
        assert run.record().command.endswith(f" --data-dir {folder}")


def test_commands_find_the_folder_of_images_of_a_run(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DCNET_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    assert train(tmp_path, "--data-dir", "photos") == 0
    run = only_run(tmp_path)
    capsys.readouterr()
    assert call("evaluate", run.folder, "--device", "cpu", "--workers", "0") == 0
    assert "equal to the record" in capsys.readouterr().out
    moved = (tmp_path / "photos").rename(tmp_path / "moved")
    message = complaint(capsys, "evaluate", run.folder)
    assert f"the folder of the images of the run, '{tmp_path / 'photos'}', does not exist" in message
    assert call("evaluate", run.folder, "--device", "cpu", "--workers", "0", "--data-dir", moved) == 0
    assert "equal to the record" in capsys.readouterr().out
    other = photos(tmp_path / "other", seed=1)
    message = complaint(capsys, "evaluate", run.folder, "--data-dir", other)
    assert f"'{other}' has other images than the run was trained on (16 + 4 of 2 classes, cat, dog, but with" in message
    # A finished run stays finished if its images move.
    assert call("train", "--resume", run.folder) == 0
    assert "is already done" in capsys.readouterr().out


def test_resume_requires_the_images_of_the_run(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DCNET_DATA", raising=False)
    folder = photos(tmp_path / "photos")
    (folder / "cat" / "2.png").write_bytes(b"")
    options = ["--data-dir", folder, "--skip-bad-images", "--checkpoint-every", "1"]
    stops = Trainer._one_step

    def fails_later(trainer: Trainer) -> bool:
        if trainer.done == 2:
            raise OSError("the disk is gone")
        return stops(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_one_step", fails_later)
        assert train(tmp_path, *options) == 1
    run = only_run(tmp_path)
    assert len(run.checkpoints.files()) == 2
    kept = shutil.copytree(folder, tmp_path / "kept")
    (folder / "dog" / "new.png").write_bytes((folder / "dog" / "0.png").read_bytes())
    capsys.readouterr()
    assert call("train", "--resume", run.folder, "--device", "cpu", "--workers", "0") == 2
    assert f"'{folder}' has other images than the run was trained on" in capsys.readouterr().err
    assert call("train", "--resume", run.folder, "--device", "cpu", "--workers", "0", "--data-dir", kept) == 0
    assert "resumes after step 2" in capsys.readouterr().out
    record = run.record()
    assert (record.status, record.data.skipped) == ("done", ["cat/2.png"])


def test_all_damaged_images_are_reported_before_training(tmp_path: Path, capsys: Capture):
    folder = photos(tmp_path / "photos")
    bad = ["cat/3.png", "dog/0.png", "dog/7.png"]
    for name in bad:
        (folder / name).write_bytes(b"no image")
    assert train(tmp_path, "--data-dir", folder) == 2
    message = f"dcnet train: 3 of 20 images in {folder} cannot be read: {', '.join(bad)}; replace or delete them, or "
    assert capsys.readouterr().err == f"{message}skip them with --skip-bad-images\n"
    assert not all_runs(tmp_path / "runs")
    assert train(tmp_path, "--data-dir", folder, "--skip-bad-images") == 0
    out = capsys.readouterr().out
    assert f"cannot be read: {', '.join(bad)}; they are skipped, and listed in the record" in out
    record = only_run(tmp_path).record()
    assert record.data.skipped == bad
    assert record.data.train_images + record.data.test_images == 17
    assert record.command.endswith("--skip-bad-images")
    assert call("evaluate", only_run(tmp_path).folder, "--device", "cpu", "--workers", "0") == 0
    assert "equal to the record" in capsys.readouterr().out


def test_run_without_a_fingerprint_is_used_for_the_same_images(tmp_path: Path, capsys: Capture):
    """The name of its folder depends on the config only; its record has the classes and numbers of images."""
    folder = photos(tmp_path / "photos")
    assert train(tmp_path, "--data-dir", folder) == 0
    run = only_run(tmp_path)
    record = run.record().to_json()
    config = recipe("digits", dataset="imagefolder", image_size=14, batch_size=4, width=0.1, epochs=1, operator="conv")
    for name in ("data", "network"):
        del record["config"][name]
    for name in ("fingerprint", "folder", "held_out", "image_files"):
        del record["data"][name]
    older = Run.of(config, tmp_path / "runs")
    run.folder.rename(older.folder)
    write_json(older.record_file, record | {"hash": config.hash})
    capsys.readouterr()
    assert train(tmp_path, "--data-dir", folder) == 0
    assert f"{older.folder.name} is already done" in capsys.readouterr().out
    assert call("evaluate", older.folder, "--device", "cpu", "--workers", "0", "--data-dir", folder) == 0
    (folder / "dog" / "0.png").unlink()
    assert train(tmp_path, "--data-dir", folder) == 0
    assert len(all_runs(tmp_path / "runs")) == 2


# --- networks and data that are not registered ---


class Mine(nn.Module):
    """A custom network."""

    def __init__(self, hidden: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input)


CONFIG = recipe("digits", epochs=1, width=0.1, train_images=60)
AS_COMMAND = ["--epochs", "1", "--width", "0.1", "--train-images", "60", "--device", "cpu"]


def trained(tmp_path: Path, **given: Any) -> tuple[Run, Record]:
    run = Run.of(CONFIG, tmp_path)
    return run, Trainer(CONFIG, run, Execution(device="cpu"), **given).run()


@pytest.mark.parametrize("again", [[], ["--again"]])
def test_commands_reject_runs_of_unregistered_networks(tmp_path: Path, capsys: Capture, again: list[str]):
    run, record = trained(tmp_path, model=Mine())
    assert (record.name, record.command) == ("digits-Mine-seed0", None)
    assert call("train", *AS_COMMAND, "--runs", tmp_path, *again) == 2
    out, err = capsys.readouterr()
    assert "is already done" not in out
    assert f"dcnet train: {str(run.folder)!r} holds another run, digits-Mine-seed0, which has custom data or" in err
    assert run.record() == record
    custom = f"the run {run.folder.name!r} has a custom network, {__name__}.Mine, which only your code can build"
    image = tmp_path / "image.png"
    Image.new("L", (8, 8)).save(image)
    for words in (
        ["evaluate"],
        ["predict"],
        ["attack"],
        ["convert", "--onnx", tmp_path / "x.onnx"],
        ["plot", "features"],
    ):
        assert custom in complaint(capsys, *words, run.folder, *([image] if words == ["predict"] else []))
    assert call("train", "--resume", run.folder) == 2
    assert custom in capsys.readouterr().err
    # In its own folder it does not affect the others.
    own = Run.of(CONFIG, tmp_path / "both", model=Mine())
    assert own.folder.name == record.run_name
    assert Trainer(CONFIG, own, Execution(device="cpu"), model=Mine()).run().status == "done"
    assert call("train", *AS_COMMAND, "--runs", tmp_path / "both", *again) == 0
    assert len(all_runs(tmp_path / "both")) == 2


def test_commands_reject_runs_of_unregistered_datasets(tmp_path: Path, capsys: Capture):
    pixels = torch.randint(0, 256, (80, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(pixels, torch.arange(80) % 10)
    data = Dataset("digits", split, split, tuple("0123456789"))
    run, record = trained(tmp_path, dataset=data)
    assert (record.data.fingerprint, record.command) == (record.config["data"], None)
    assert call("train", *AS_COMMAND, "--runs", tmp_path) == 2
    assert "holds another run" in capsys.readouterr().err
    assert "has a custom dataset, 'digits', which only your code can load" in complaint(capsys, "evaluate", run.folder)
    model, _ = load_model(run)
    assert model(pixels.float() / 255).shape == (80, 10)


def test_registered_dataset_is_not_custom_data(tmp_path: Path):
    _, record = trained(tmp_path, dataset=load_dataset("digits"))
    assert (record.hash, record.command) == (CONFIG.hash, command_of(CONFIG))
    assert call("train", *AS_COMMAND, "--runs", tmp_path) == 0
