"""`dcnet verify`: comparisons with error rates, calibration by pairs, and the report on pairs."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli_runs import answer, call, color_run
from helpers.verify_cases import (
    IMAGES,
    PAIRS,
    digit_scores,
    embeddings,
    lfw_folder,
    listed,
    margin_run,
    set_thresholds,
)
from PIL import Image

from dcnet.data import load_dataset
from dcnet.training import Record, Run, load_model
from dcnet.training.image_input import ImageInput
from dcnet.training.record import DataDescription
from dcnet.verification import Calibration, Pairs, calibrate, fold_accuracy, make_folds, pair_scores, retrieve, roc
from dcnet.verification.folds import Folds
from dcnet.verification.pairs import labels_by_folder

Capture = pytest.CaptureFixture[str]
RATES = ("--far", "0.1", "--frr", "0.1")
NAMES = ("lfw", "cifar10")


def calibrated(capsys: Capture, run: Run, pairs: Path, *options: str) -> dict:
    return answer(capsys, "verify", run.folder, "--calibrate", "--pairs", pairs, *RATES, *options)


def test_calibrate_stores_the_thresholds_of_the_pairs(capsys: Capture, run: Run, pairs: Path):
    found = calibrated(capsys, run, pairs, "--images", str(pairs.parent))
    scores, same = digit_scores(run, pairs)
    wanted = calibrate(scores[same], scores[~same], far=0.1, frr=0.1)
    assert found["decision"]["upper"] == pytest.approx(wanted.upper, abs=1e-5)
    assert found["decision"]["far"] == wanted.far
    kept = Calibration.load(found["file"])
    assert Path(found["file"]).parent == run.folder
    assert kept.to_json() == {key: found[key] for key in ("decision", "data", "weights", "flip")}
    assert kept.data["list"] == str(pairs)
    counts = {key: kept.data[key] for key in ("pairs", "same", "different", "files", "left_out")}
    assert counts == {"pairs": PAIRS, "same": PAIRS / 2, "different": PAIRS / 2, "files": IMAGES, "left_out": 0}
    assert not list(run.folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("above", "below", "verdict"), [(-0.1, -0.2, "same"), (0.2, 0.1, "different"), (0.1, -0.1, "too close to call")]
)
def test_two_images_are_compared(capsys: Capture, run: Run, pairs: Path, above: float, below: float, verdict: str):
    calibrated(capsys, run, pairs)
    images = [pairs.parent / "0.png", pairs.parent / "1.png"]
    score = digit_scores(run, listed(pairs.parent / "two.csv", [("0.png", "1.png", False)]))[0].item()
    set_thresholds(run, score + below, score + above)
    found = answer(capsys, "verify", run.folder, *images)
    assert found["verdict"] == verdict
    assert found["same"] == {"same": True, "different": False}.get(verdict)
    assert found["score"] == pytest.approx(score, abs=1e-5)
    assert found["images"] == [str(image) for image in images]


def test_comparison_shows_the_error_rates_at_its_thresholds(capsys: Capture, run: Run, pairs: Path):
    calibrated(capsys, run, pairs)
    found = answer(capsys, "verify", run.folder, pairs.parent / "0.png", pairs.parent / "0.png")
    assert (found["verdict"], found["score"]) == ("same", pytest.approx(1))
    scores, same = digit_scores(run, pairs)
    for row in found["thresholds"]:
        # Scores are rounded differently in other batches.
        accepted = scores >= row["threshold"] - 1e-6
        assert row["false_accepts"] == pytest.approx(accepted[~same].double().mean().item())
        assert row["false_rejects"] == pytest.approx(1 - accepted[same].double().mean().item())
    assert call("verify", run.folder, pairs.parent / "0.png", pairs.parent / "0.png") == 0
    text = capsys.readouterr().out
    assert text.startswith("same: the cosine is 1.000\n")
    assert f"{100 * found['thresholds'][0]['false_accepts']:.2f}" in text
    assert f"calibrated by {PAIRS} pairs, {PAIRS // 2} of them the same, of {pairs}\n" in text
    assert "note: 120 impostor pairs are too few" not in text


def test_no_flip_is_stored_with_the_calibration(capsys: Capture, run: Run, pairs: Path):
    assert calibrated(capsys, run, pairs, "--no-flip")["flip"] is False
    two = listed(pairs.parent / "two.csv", [("0.png", "1.png", False)])
    found = answer(capsys, "verify", run.folder, pairs.parent / "0.png", pairs.parent / "1.png")
    assert found["score"] == pytest.approx(digit_scores(run, two, flip=False)[0].item(), abs=1e-5)
    assert found["score"] != pytest.approx(digit_scores(run, two)[0].item(), abs=1e-4)


def test_report_equals_that_of_the_library(capsys: Capture, run: Run, pairs: Path):
    found = answer(capsys, "verify", run.folder, "--pairs", pairs)
    scores, same = digit_scores(run, pairs)
    folds = make_folds(same)
    for key, balanced in {"accuracy": False, "balanced_accuracy": True}.items():
        wanted = fold_accuracy(scores, same, folds, balanced)
        assert found[key]["mean"] == pytest.approx(wanted.mean)
        assert found[key]["standard_error"] == pytest.approx(wanted.standard_error)
    curve = roc(scores, same)
    assert (found["folds"], found["auc"], found["eer"]) == (10, pytest.approx(curve.auc()), pytest.approx(curve.eer()))
    by_rate = {at["far"]: at["tar"] for at in found["tar_at_far"]}
    assert by_rate == {0.1: curve.tar_at_far(0.1).tar, 0.01: curve.tar_at_far(0.01).tar, 0.001: None, 0.0001: None}
    assert Path(found["plot"]) == run.folder / "roc.png"
    assert found["auc"] > 0.8
    assert not (run.folder / "verification.json").exists()


def test_report_is_printed_and_drawn(capsys: Capture, run: Run, pairs: Path, tmp_path: Path):
    assert call("verify", run.folder, "--pairs", pairs, "--out", tmp_path / "curve.svg") == 0
    text = capsys.readouterr().out
    assert f"run: {PAIRS} pairs, {PAIRS // 2} same and {PAIRS // 2} different, of {pairs}" in text
    for words in ("accuracy, 10 folds", "balanced accuracy", "(AUC)", "(EER)", "at 1 % false accepts", "too few pairs"):
        assert words in text
    assert re.search(r"accuracy, 10 folds.*\d\d\.\d\d ± \d\.\d\d", text)
    assert "note: the folds are random, since the list has none" in text
    assert text.endswith(f"wrote {tmp_path / 'curve.svg'}\n")
    assert "</svg>" in (tmp_path / "curve.svg").read_text()


def test_features_are_the_input_of_a_margin_head(capsys: Capture, tmp_path: Path, pairs: Path):
    run = margin_run(tmp_path / "margin")
    calibrated(capsys, run, pairs)
    found = answer(capsys, "verify", run.folder, pairs.parent / "3.png", pairs.parent / "4.png")
    model, _ = load_model(run)
    both = embeddings(model, load_dataset("digits").test.images[3:5])
    assert both.shape == (2, 8)
    assert found["score"] == pytest.approx(torch.cosine_similarity(*both, dim=0).item(), abs=1e-5)


def test_lfw_images_are_preprocessed_as_in_the_run(capsys: Capture, tmp_path: Path):
    run = color_run(tmp_path / "run", tmp_path / "images")
    # The loader of training crops the center, and so must this.
    lfw = lfw_folder(tmp_path / "images" / "test", ("Ada", "Bob", "Cy", "Di"))
    found = answer(capsys, "verify", run.folder, "--lfw", lfw)
    assert (found["folds"], found["fold_note"], found["data"]["list"]) == (2, "", "LFW pairs")
    (tmp_path / "images" / "val").rename(tmp_path / "images" / "before")
    for person in ("Ada", "Bob", "Cy", "Di"):
        (tmp_path / "images" / "train" / person).mkdir()
        (tmp_path / "images" / "train" / person / "any.png").write_bytes(b"")
    data = load_dataset("imagefolder", tmp_path / "images")
    ((images, _),) = data.test_loader(8, size=14, workers=0)
    scores = pair_scores(embeddings(load_model(run)[0], images), torch.tensor([0, 0, 4, 4]), torch.tensor([1, 2, 5, 6]))
    assert found["auc"] == roc(scores, torch.tensor([True, False] * 2)).auc()
    accuracy = fold_accuracy(scores, torch.tensor([True, False] * 2), torch.tensor([0, 0, 1, 1]))
    assert found["accuracy"]["thresholds"] == pytest.approx(accuracy.thresholds, abs=1e-5)


def test_classes_of_training_are_reported_and_can_be_excluded(capsys: Capture, tmp_path: Path):
    run = color_run(tmp_path / "run", tmp_path / "images")
    lfw = lfw_folder(tmp_path / "lfw", ("Ada", "dark", "Cy", "Di"))
    options = ("verify", run.folder, "--data-dir", lfw)
    (note,) = answer(capsys, *options)["data"]["notes"]
    assert note == "1 of 4 pairs show a class that the run was trained on, which is easier: see --unseen"
    found = answer(capsys, *options, "--unseen", "--calibrate")
    assert {key: found["data"][key] for key in ("pairs", "left_out", "notes")} == {
        "pairs": 3,
        "left_out": 1,
        "notes": [],
    }
    assert call(*options, "--unseen", "--calibrate") == 0
    text = capsys.readouterr().out
    assert "3 pairs, 2 same and 1 different, of LFW pairs, without 1 that show a training class" in text
    assert "rule of three" in text
    assert answer(capsys, *options, "--lfw-list", "pairsDevTest")["folds"] == 2
    assert json.loads((run.folder / "verification.json").read_text())["data"]["images"] == str(lfw)


def test_report_is_stored_in_the_record(capsys: Capture, run: Run, pairs: Path, tmp_path: Path):
    before = run.record()
    found = answer(capsys, "verify", run.folder, "--pairs", pairs)
    answer(capsys, "verify", run.folder, "--pairs", pairs, "--no-flip")
    record = run.record().to_json()
    kept = record.pop("evaluations")
    assert record == before.to_json()
    assert list(kept) == ["pairs-pairs", "pairs-pairs-no-flip"]
    assert kept["pairs-pairs"] == {key: value for key, value in found.items() if key not in ("run", "plot")}
    assert call("verify", run.folder, "--pairs", pairs) == 0
    text = capsys.readouterr().out
    assert f"stored in {run.record_file} as 'pairs-pairs'" in "".join(text.splitlines())
    people = lfw_folder(tmp_path / "lfw", ("Ada", "Bob", "Cy", "Di"))
    answer(capsys, "verify", run.folder, "--lfw", people, "--unseen")
    answer(capsys, "verify", run.folder, "--lfw", people, "--lfw-list", "pairsDevTest.txt")
    assert list(run.record().evaluations)[2:] == ["lfw-pairs-unseen", "lfw-pairsDevTest"]
    calibrated(capsys, run, pairs)
    assert len(run.record().evaluations) == 4


def test_read_only_run_gets_a_report(capsys: Capture, run: Run, pairs: Path):
    run.write(dataclasses.replace(run.record(), status="running"))
    assert call("verify", run.folder, "--pairs", pairs) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "note: the report is not stored in the record: evaluations need a finished run" in text
    assert not run.record().evaluations


def test_original_faces_are_cropped_to_the_center(tmp_path: Path):
    pixels = np.full((250, 250, 3), 255, dtype=np.uint8)
    pixels[61:189, 61:189] = 100
    Image.fromarray(pixels).save(tmp_path / "face.png")
    data = DataDescription(channels=3, image_size=96)
    records = {name: Record(data=data, config={"dataset": name}) for name in NAMES}
    seen = {name: ImageInput.of(record).read([tmp_path / "face.png"]) for name, record in records.items()}
    assert seen["lfw"].unique().tolist() == pytest.approx([100 / 255])
    assert seen["cifar10"].max() == 1


def test_folds_without_one_kind_of_pair_are_replaced():
    rows = [("a", "b", True), ("a", "c", True), ("b", "d", False), ("c", "d", False)]
    as_listed, random = (Folds.of(Pairs.of_names(rows, folds)) for folds in ([0, 1, 0, 1], [0, 0, 1, 1]))
    assert (as_listed.numbers.tolist(), as_listed.note) == ([0, 1, 0, 1], "")
    assert sorted(random.numbers[:2].tolist()) == sorted(random.numbers[2:].tolist()) == [0, 1]
    assert random.note == "the folds are random, since a fold of the list has only one kind of pairs"


def test_verify_help_names_all_options(capsys: Capture):
    with pytest.raises(SystemExit):
        call("verify", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in (
        "--people",
        "--by-norm",
        "--export",
        "--pairs",
        "--images",
        "--lfw",
        "--calibrate",
        "--far",
        "--frr",
        "--unseen",
        "--out",
        "--json",
    ):
        assert f"{option} " in text
    assert "dcnet verify RUN a.jpg b.jpg prints same, different, or too close to call" in text
    assert "None" not in text


def test_report_has_recall_and_precision_if_folders_are_classes(
    capsys: Capture, run: Run, pairs: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the table, as JSON and in the record; omitted without such folders."""
    monkeypatch.setenv("COLUMNS", "200")
    test = load_dataset("digits").test
    assert answer(capsys, "verify", run.folder, "--pairs", pairs)["retrieval"] is None
    for place, label in enumerate(test.labels[:IMAGES].tolist()):
        (pairs.parent / str(label)).mkdir(exist_ok=True)
        (pairs.parent / f"{place}.png").rename(pairs.parent / str(label) / f"{place}.png")
    lines = [line.split(",") for line in pairs.read_text().splitlines()]
    labels = [int(test.labels[place]) for place in range(IMAGES)]

    def moved(name: str) -> str:
        return f"{labels[int(name.removesuffix('.png'))]}/{name}"

    sorted_by_class = listed(pairs, ((moved(one), moved(two), same == "1") for one, two, same in lines))
    found = answer(capsys, "verify", run.folder, "--pairs", sorted_by_class)["retrieval"]
    expected = retrieve(embeddings(load_model(run)[0], test.images[:IMAGES]), test.labels[:IMAGES])
    assert {at["k"]: at["recall"] for at in found["recall"]} == pytest.approx(expected.recall)
    assert found["mean_average_precision"] == pytest.approx(expected.mean_average_precision)
    assert (found["queries"], found["gallery"]) == (IMAGES, IMAGES - 1)
    assert run.record().evaluations["pairs-pairs"].extra["retrieval"] == found
    capsys.readouterr()
    assert call("verify", run.folder, "--pairs", sorted_by_class) == 0
    shown = capsys.readouterr().out
    assert f"recall@1, {IMAGES} images, each among {IMAGES - 1} others" in shown
    assert f"{100 * expected.mean_average_precision:.2f}" in shown


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([("a/1", "a/2", True), ("a/1", "b/1", False)], [0, 0, 1]),
        ([("x/a/1", "y/a/2", True), ("x/a/1", "x/b/1", False)], [0, 0, 1]),
        ([("a/1", "b/1", True), ("a/1", "a/2", True)], None),
        ([("a/1", "a/2", False), ("a/1", "a/3", True)], None),
        ([("1", "2", True), ("1", "a/3", False)], None),
        ([("a/1", "b/1", False), ("a/1", "c/1", False)], None),
    ],
)
def test_folders_are_classes_if_all_pairs_agree(rows: list[tuple[str, str, bool]], labels: list[int] | None):
    found = labels_by_folder(Pairs.of_names(rows))
    assert (None if found is None else found.tolist()) == labels
