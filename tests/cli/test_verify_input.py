"""`dcnet verify` with wrong input: one-line errors, exit code 2, and existing files stay."""

from pathlib import Path

import pytest
import torch
from helpers.cli_runs import answer, color_run, complaint
from helpers.verify_cases import lfw_folder, listed
from torch import Tensor, nn

from dcnet.models import blocks
from dcnet.training import Run
from dcnet.training.tensor_files import read_tensors, write_tensors

Capture = pytest.CaptureFixture[str]


def with_zeros(run: Run) -> None:
    tensors, notes = read_tensors(run.model_file)
    zeros = {name: torch.zeros_like(value) for name, value in tensors.items() if not name.endswith((".mean", ".std"))}
    write_tensors(run.model_file, tensors | zeros, notes)


def test_missing_calibration_error_says_how_to_calibrate(capsys: Capture, run: Run, pairs: Path):
    message = complaint(capsys, "verify", run.folder, pairs.parent / "0.png", pairs.parent / "1.png")
    assert "the run 'run' is not calibrated, so it has no thresholds" in message
    assert f"use `dcnet verify {run.folder} --calibrate --people FOLDER`" in message


def test_comparison_requires_a_calibration_of_the_same_weights(capsys: Capture, run: Run, pairs: Path):
    images = (pairs.parent / "0.png", pairs.parent / "1.png")
    answer(capsys, "verify", run.folder, "--calibrate", "--pairs", pairs)
    tensors, notes = read_tensors(run.model_file)
    write_tensors(run.model_file, {name: value + 1 for name, value in tensors.items()}, notes)
    message = complaint(capsys, "verify", run.folder, *images)
    assert "the run 'run' has other weights than when it was calibrated" in message
    for text in ("{", "{}", "[]", '{"decision": {}, "data": {}, "weights": "", "flip": true}'):
        (run.folder / "verification.json").write_text(text)
        message = complaint(capsys, "verify", run.folder, *images)
        assert f"{str(run.folder / 'verification.json')!r} is not a calibration: " in message


def test_unreadable_image_is_reported_and_the_calibration_stays(capsys: Capture, run: Run, pairs: Path):
    answer(capsys, "verify", run.folder, "--calibrate", "--pairs", pairs)
    before = (run.folder / "verification.json").read_bytes()
    broken = pairs.parent / "7.png"
    broken.write_text("no image")
    for arguments in (("--pairs", pairs, "--calibrate"), ("--pairs", pairs), (pairs.parent / "0.png", broken)):
        message = complaint(capsys, "verify", run.folder, *arguments)
        assert f"{str(broken)!r} cannot be read as an image: " in message
    assert (run.folder / "verification.json").read_bytes() == before
    assert not (run.folder / "roc.png").exists()


def test_missing_image_is_reported_with_its_line_in_the_list(capsys: Capture, run: Run, pairs: Path, tmp_path: Path):
    file = listed(pairs.parent / "missing.csv", [("0.png", "1.png", True), ("2.png", "none.png", False)])
    for option in ((), ("--calibrate",)):
        message = complaint(capsys, "verify", run.folder, "--pairs", file, *option)
        assert f"{file}, line 2: '2.png,none.png,0': expected existing images" in message
    lfw = lfw_folder(tmp_path / "lfw", ("Ada", "Bob", "Cy", "Di"))
    (lfw / "Cy" / "Cy_0002.jpg").unlink()
    message = complaint(capsys, "verify", run.folder, "--lfw", lfw)
    assert f"{lfw / 'pairs.txt'}, line 4: " in message


def test_lists_with_too_few_pairs_are_rejected(capsys: Capture, run: Run, pairs: Path, tmp_path: Path):
    for same, kind in ((True, "different"), (False, "same")):
        file = listed(pairs.parent / "one.csv", [("0.png", "1.png", same)] * 3)
        message = complaint(capsys, "verify", run.folder, "--pairs", file)
        assert f"{file} has 3 pairs, but none is {kind!r}: both kinds are needed" in message
    few = listed(pairs.parent / "few.csv", [("0.png", "1.png", True), ("2.png", "3.png", False)])
    message = complaint(capsys, "verify", run.folder, "--pairs", few)
    assert "folds need two pairs or more of each kind, not 1 and 1" in message
    lfw = lfw_folder(tmp_path / "lfw", ("Ada", "dark", "Cy", "light"))
    trained = color_run(tmp_path / "color", tmp_path / "images")
    message = complaint(capsys, "verify", trained.folder, "--lfw", lfw, "--unseen")
    assert "LFW pairs has 2 pairs, but none is 'different'" in message
    assert "there is no list 'other.txt'" in complaint(
        capsys, "verify", run.folder, "--lfw", lfw, "--lfw-list", "other"
    )


def test_zero_embedding_is_reported_with_its_image(capsys: Capture, run: Run, pairs: Path):
    with_zeros(run)
    message = complaint(capsys, "verify", run.folder, "--pairs", pairs)
    first = pairs.read_text().partition(",")[0]
    assert f"the norm of embedding 0 ({pairs.parent / first}) is zero; 60 of 60 embeddings are invalid" in message
    assert "a cosine needs embeddings that are finite and not zero" in message


class NoFeatures(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(1)


def test_network_without_features_is_rejected(capsys: Capture, run: Run, pairs: Path, monkeypatch: pytest.MonkeyPatch):
    model = blocks.Normalized(NoFeatures(), [0.0], [1.0])
    monkeypatch.setattr("dcnet.training.load_model", lambda run: (model, run.record()))
    message = complaint(capsys, "verify", run.folder, "--pairs", pairs)
    assert "the run 'run' has no features to compare: its network, NoFeatures, has no method `features`" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give two images, or labeled pairs with --people, --pairs or --lfw, not nothing"),
        (["a.png"], "give two images to compare, not 1"),
        (["a.png", "b.png", "c.png"], "give two images to compare, not 3"),
        (
            ["a.png", "b.png", "--pairs", "p.csv"],
            "give two images, or labeled pairs with --people, --pairs or --lfw, not both",
        ),
        (["a.png", "b.png", "--calibrate"], "--calibrate needs labeled pairs"),
        (["--pairs", "p.csv", "--lfw", "lfw"], "--pairs and --lfw exclude each other"),
        (["--lfw", "lfw", "--images", "."], "--images needs --pairs"),
        (["--pairs", "p.csv", "--lfw-list", "pairs"], "--lfw-list needs --lfw"),
        (["--pairs", "p.csv", "--images", "none"], "--images must be a folder with the images, not 'none'"),
        (["--pairs", "p.csv", "--far", "0.1"], "--far is only for --calibrate"),
        (["--pairs", "p.csv", "--calibrate", "--frr", "1.5"], "--frr must be above 0 and below 1, not 1.5"),
        (["--pairs", "p.csv", "--calibrate", "--far", "1e-309"], "--far must be 1e-12 or more, not 1e-309"),
        (["--pairs", "p.csv", "--calibrate", "--out", "a.png"], "--out is only for a report"),
        (["a.png", "b.png", "--unseen"], "--unseen is only for --people, --pairs or --lfw"),
        (["a.png", "b.png", "--no-flip"], "--no-flip is only for --people, --pairs or --lfw"),
        (["--pairs", "p.csv"], "p.csv cannot be read as a list: No such file or directory"),
        (["--lfw", "none"], "there is no folder 'none'"),
    ],
)
def test_incompatible_options_are_rejected(capsys: Capture, run: Run, options: list[str], message: str):
    assert message in complaint(capsys, "verify", run.folder, *options)


def test_other_picture_formats_are_rejected(capsys: Capture, run: Run, pairs: Path):
    message = complaint(capsys, "verify", run.folder, "--pairs", pairs, "--out", "a.gif")
    assert "--out must be a file such as .png or .svg, not 'a.gif'" in message
