"""`dcnet predict`: preprocessing of image files, and their classes."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli_runs import answer, call, color_run, complaint, trained
from PIL import Image

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


def test_image_file_gets_the_same_classes_as_in_the_dataset(capsys: Capture, tmp_path: Path, wanted: list[float]):
    Image.fromarray(digit()).save(tmp_path / "digit.png")
    assert predicted(capsys, tmp_path / "digit.png") == pytest.approx(wanted, rel=1e-4)


def test_image_formats_give_the_same_classes(capsys: Capture, tmp_path: Path, wanted: list[float]):
    gray = digit()
    clear = np.stack([np.full_like(gray, 255)] * 3 + [gray], axis=2)
    files = {
        "color.png": Image.fromarray(gray).convert("RGB"),
        "deep.png": Image.fromarray(gray.astype(np.uint16) * 257),
        "clear.png": Image.fromarray(clear),
        "palette.png": Image.fromarray(gray).convert("P"),
        "large.png": Image.fromarray(gray.repeat(8, 0).repeat(8, 1)),
    }
    for name, image in files.items():
        image.save(tmp_path / name)
        # Large pixels are blurred at their edges.
        assert predicted(capsys, tmp_path / name) == pytest.approx(wanted, abs=0.2 if name == "large.png" else 0.01), (
            name
        )


def test_large_image_is_resized_by_averaging(capsys: Capture, tmp_path: Path):
    stripes = np.zeros((80, 80), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    gray = expected(torch.full((1, 1, 8, 8), 127.5 / 255))
    assert predicted(capsys, tmp_path / "stripes.png") == pytest.approx(gray, abs=0.05)


def test_invert_swaps_light_and_dark(capsys: Capture, tmp_path: Path, wanted: list[float]):
    Image.fromarray(255 - digit()).save(tmp_path / "paper.png")
    assert predicted(capsys, tmp_path / "paper.png", "--invert") == pytest.approx(wanted, rel=1e-4)
    assert predicted(capsys, tmp_path / "paper.png") != pytest.approx(wanted, abs=0.01)


def test_color_images_are_cropped_as_in_training(capsys: Capture, tmp_path: Path):
    run = color_run(tmp_path / "run", tmp_path / "images")
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


def test_predict_works_with_two_classes(capsys: Capture, tmp_path: Path):
    run = color_run(tmp_path / "run", tmp_path / "images")
    (found,) = answer(capsys, "predict", run.folder, tmp_path / "images" / "val" / "dark" / "0.png")
    assert sorted(best["class"] for best in found["classes"]) == ["dark", "light"]


def test_predict_prints_three_classes_per_image(
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


def bad_files(folder: Path) -> list[Path]:
    """A text file, a truncated image, and a folder named like an image."""
    folder.mkdir(exist_ok=True)
    (folder / "text.png").write_text("no image")
    whole = folder / "whole"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50), np.uint8)).save(whole, "PNG")
    (folder / "half.png").write_bytes(whole.read_bytes()[:900])
    whole.unlink()
    return [folder / "text.png", folder / "half.png"]


def test_unreadable_image_is_rejected(capsys: Capture, tmp_path: Path):
    bad = bad_files(tmp_path)
    run = trained()["conv"].folder
    for path in bad:
        message = complaint(capsys, "predict", run, path)
        assert f"{str(path)!r} cannot be read as an image: " in message
    assert complaint(capsys, "predict", run, tmp_path).endswith("; the other 1 cannot be read either\n")
    assert "there is no file or folder" in complaint(capsys, "predict", run, tmp_path / "none.png")
    (tmp_path / "empty").mkdir()
    assert "empty' has no images: expected files such as .png or .jpg, at any depth" in complaint(
        capsys, "predict", run, tmp_path / "empty"
    )


def photos(folder: Path) -> list[Path]:
    """A folder with nested and hidden images, other files, and two damaged images."""
    files = [folder / name for name in ("a.png", "b/c.JPG", "b/d/e.bmp", 'ü,"x".png')]
    for place, file in enumerate([*files, folder / ".hidden" / "f.png", folder / "._a.png"]):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digit(place)).save(file)
    (folder / "notes.txt").write_text("none")
    return files


def test_predict_classifies_nested_folders(capsys: Capture, tmp_path: Path):
    files = photos(tmp_path)
    found = answer(capsys, "predict", trained()["tanh-cos"].folder, tmp_path, "--top", "2")
    assert [entry["image"] for entry in found] == [str(file) for file in sorted(files)]
    alone = answer(capsys, "predict", trained()["tanh-cos"].folder, *sorted(files), "--top", "2")
    assert found == alone
    assert all(len(entry["classes"]) == 2 for entry in found)


def test_several_batches_of_images_keep_their_order(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = photos(tmp_path)
    run = trained()["tanh-cos"].folder
    expected = [entry for file in files for entry in answer(capsys, "predict", run, file)]
    monkeypatch.setattr("dcnet.cli.predict.BATCH", 3)
    found = answer(capsys, "predict", run, *files, files[0])
    assert [entry["image"] for entry in found] == [str(file) for file in (*files, files[0])]
    for entry, alone in zip(found, [*expected, expected[0]], strict=True):
        assert entry["classes"][0]["class"] == alone["classes"][0]["class"]
        assert entry["classes"][0]["probability"] == pytest.approx(alone["classes"][0]["probability"], rel=1e-4)


def test_bad_images_are_reported_and_the_others_classified(capsys: Capture, tmp_path: Path):
    files, bad = photos(tmp_path), bad_files(tmp_path / "b")
    run, out = trained()["tanh-cos"].folder, tmp_path / "out" / "found.csv"
    assert call("predict", run, tmp_path, "--json", "--csv", out) == 1
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("dcnet predict: '") and "cannot be read as an image" in line for line in lines)
    found = {entry["image"]: entry for entry in json.loads(output.out)}
    assert found.keys() == {str(file) for file in (*files, *bad)}
    rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert list(rows[0]) == ["image", *(f"{name}_{i}" for i in (1, 2, 3) for name in ("class", "probability")), "error"]
    for row in rows:
        entry = found[row["image"]]
        assert row["error"] == entry.get("error", "")
        for i, best in enumerate(entry.get("classes", ())):
            assert (row[f"class_{i + 1}"], float(row[f"probability_{i + 1}"])) == (best["class"], best["probability"])
        assert (row["class_1"] == "") == (Path(row["image"]) in bad)


def test_csv_option_writes_a_table_instead_of_printing_it(capsys: Capture, tmp_path: Path):
    photos(tmp_path / "photos")
    run, out = trained()["tanh-cos"].folder, tmp_path / "found.csv"
    assert call("predict", run, tmp_path / "photos", "--csv", out, "--top", "1") == 0
    assert capsys.readouterr().out == f"wrote {out}: 4 of 4 images classified\n"
    assert out.read_text(encoding="utf-8").startswith("image,class_1,probability_1,error\n")
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "photos"]
    # An unwritable file is reported before anything is classified, and the old file stays.
    message = complaint(capsys, "predict", run, tmp_path / "photos", "--csv", tmp_path / "photos")
    assert "photos': it is a folder" in message


def test_wrong_options_are_rejected(capsys: Capture, tmp_path: Path):
    run = trained()["conv"].folder
    assert "give one or more images" in complaint(capsys, "predict", run)
    for top in ("0", "11"):
        message = complaint(capsys, "predict", run, "a.png", "--top", top)
        assert f"--top must be from 1 to 10, the number of classes, not {top}" in message
    assert "there is no run" in complaint(capsys, "predict", tmp_path / "none", "a.png")
