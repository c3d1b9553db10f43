"""`dcnet predict`: any image file becomes what the network was trained on, and gets its classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import answer, call, colour_run, complaint, trained

from dcnet.data import load_dataset
from dcnet.training import load_model

Capture = pytest.CaptureFixture[str]


def digit(place: int = 0) -> np.ndarray:
    return load_dataset("digits").test.images[place, 0].numpy()


def expected(pixels: torch.Tensor) -> list[float]:
    model, _ = load_model(trained()["tanh-cos"])
    with torch.no_grad():
        return model(pixels).double().softmax(1)[0].tolist()


def predicted(capsys: Capture, path: Path, *options: str) -> list[float]:
    (found,) = answer(capsys, "predict", trained()["tanh-cos"].folder, path, "--top", "10", *options)
    assert found["image"] == str(path)
    by_index = {best["index"]: best["probability"] for best in found["classes"]}
    assert [best["probability"] for best in found["classes"]] == sorted(by_index.values(), reverse=True)
    return [by_index[i] for i in range(10)]


@pytest.fixture
def wanted() -> list[float]:
    return expected(torch.from_numpy(digit()).float().view(1, 1, 8, 8) / 255)


def test_an_image_as_in_the_data_gets_the_same_classes(capsys: Capture, tmp_path: Path, wanted: list[float]):
    Image.fromarray(digit()).save(tmp_path / "digit.png")
    assert predicted(capsys, tmp_path / "digit.png") == pytest.approx(wanted, rel=1e-4)


def test_files_of_other_kinds_show_the_same(capsys: Capture, tmp_path: Path, wanted: list[float]):
    grey = digit()
    clear = np.stack([np.full_like(grey, 255)] * 3 + [grey], axis=2)
    files = {
        "colour.png": Image.fromarray(grey).convert("RGB"),
        "deep.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "clear.png": Image.fromarray(clear),
        "palette.png": Image.fromarray(grey).convert("P"),
        "large.png": Image.fromarray(grey.repeat(8, 0).repeat(8, 1)),
    }
    for name, image in files.items():
        image.save(tmp_path / name)
        # Large pixels are blurred where they meet.
        assert predicted(capsys, tmp_path / name) == pytest.approx(wanted, abs=0.2 if name == "large.png" else 0.01), (
            name
        )


def test_a_large_image_is_averaged_and_not_sampled(capsys: Capture, tmp_path: Path):
    stripes = np.zeros((80, 80), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    grey = expected(torch.full((1, 1, 8, 8), 127.5 / 255))
    assert predicted(capsys, tmp_path / "stripes.png") == pytest.approx(grey, abs=0.05)


def test_dark_on_light_can_be_inverted(capsys: Capture, tmp_path: Path, wanted: list[float]):
    Image.fromarray(255 - digit()).save(tmp_path / "paper.png")
    assert predicted(capsys, tmp_path / "paper.png", "--invert") == pytest.approx(wanted, rel=1e-4)
    assert predicted(capsys, tmp_path / "paper.png") != pytest.approx(wanted, abs=0.01)


def test_images_in_colour_are_cut_as_in_training(capsys: Capture, tmp_path: Path):
    run = colour_run(tmp_path / "run", tmp_path / "images")
    files = sorted((tmp_path / "images" / "val").rglob("*.png"))
    found = answer(capsys, "predict", run.folder, *files, "--top", "2")
    model, _ = load_model(run)
    data = load_dataset("imagefolder", tmp_path / "images")
    ((images, _),) = data.test_loader(6, size=14, workers=0)
    with torch.no_grad():
        probabilities = model(images).double().softmax(1)
    for entry, row in zip(found, probabilities, strict=True):
        assert {best["class"]: best["probability"] for best in entry["classes"]} == pytest.approx(
            {"dark": row[0].item(), "light": row[1].item()}
        )


def test_of_two_classes_both_are_named(capsys: Capture, tmp_path: Path):
    run = colour_run(tmp_path / "run", tmp_path / "images")
    (found,) = answer(capsys, "predict", run.folder, tmp_path / "images" / "val" / "dark" / "0.png")
    assert sorted(best["class"] for best in found["classes"]) == ["dark", "light"]


def test_the_table_has_three_classes_of_each_image(
    capsys: Capture, tmp_path: Path, wanted: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("a.png", "b.png"):
        Image.fromarray(digit()).save(tmp_path / name)
    assert call("predict", trained()["tanh-cos"].folder, tmp_path / "a.png", tmp_path / "b.png") == 0
    text = capsys.readouterr().out
    assert text.count("a.png") == text.count("b.png") == 1
    assert text.count(f"{100 * max(wanted):.2f}") == 2
    assert sum(line.startswith("│") for line in text.splitlines()) == 6


def test_what_is_no_image_is_refused(capsys: Capture, tmp_path: Path):
    (tmp_path / "text.png").write_text("no image")
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50), np.uint8)).save(whole)
    (tmp_path / "half.png").write_bytes(whole.read_bytes()[:900])
    for name in ("text.png", "half.png", "none.png", "."):
        told = complaint(capsys, "predict", trained()["conv"].folder, whole, tmp_path / name)
        assert f"{str(tmp_path / name)!r} cannot be read as an image: " in told


def test_wrong_options_are_refused(capsys: Capture, tmp_path: Path):
    run = trained()["conv"].folder
    assert "nothing to look at without an image" in complaint(capsys, "predict", run)
    for top in ("0", "11"):
        told = complaint(capsys, "predict", run, "a.png", "--top", top)
        assert f"--top must be from 1 to 10, the number of classes, not {top}" in told
    assert "there is no run" in complaint(capsys, "predict", tmp_path / "none", "a.png")
