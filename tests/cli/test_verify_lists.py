"""`dcnet verify` with lists of pairs: where they are found, what is stored, and notes."""

from pathlib import Path

import pytest
import torch
from helpers.cli_runs import answer, call, color_run, complaint
from helpers.verify_cases import lfw_folder, listed

from dcnet.training import Run
from dcnet.verification import Pairs
from dcnet.verification.folds import Folds

pytestmark = pytest.mark.usefixtures("without_pictures")
Capture = pytest.CaptureFixture[str]
PEOPLE = ("Ada", "Bob", "Cy", "Di")


def printed(capsys: Capture, *arguments: object) -> str:
    assert call("verify", *arguments) == 0
    return "".join(capsys.readouterr().out.splitlines())


def other_list(pairs: Path, rows: int) -> Path:
    """A list of some of the pairs, of the same name in another folder."""
    pairs.parent.joinpath("other").mkdir()
    lines = pairs.read_text().splitlines(keepends=True)
    file = pairs.parent / "other" / pairs.name
    file.write_text("".join([*lines[:rows], *lines[-rows:]]))
    return file


def test_replacing_the_report_on_another_list_is_reported(capsys: Capture, run: Run, pairs: Path):
    kept = f"stored in {run.record_file} as 'pairs-pairs'"
    assert f"{kept}wrote" in printed(capsys, run.folder, "--pairs", pairs)
    # The same list again is a newer report, so nothing is replaced.
    assert f"{kept}wrote" in printed(capsys, run.folder, "--pairs", pairs)
    other = other_list(pairs, 20)
    options = (run.folder, "--pairs", other, "--images", pairs.parent)
    assert f"{kept}; it replaces a report on 240 other pairs, of {pairs}wrote" in printed(capsys, *options)
    assert f"{kept}wrote" in printed(capsys, *options)
    found = answer(capsys, "verify", run.folder, "--pairs", pairs)
    assert (found["replaced"]["pairs"], found["replaced"]["list_file"]) == (40, str(other))
    assert "replaced" not in run.record().evaluations["pairs-pairs"].extra
    assert "replaced" not in answer(capsys, "verify", run.folder, "--pairs", pairs)


def test_lists_of_the_same_name_are_distinguished_by_their_paths(
    capsys: Capture, run: Run, pairs: Path, monkeypatch: pytest.MonkeyPatch
):
    """The given names may be the same."""
    other = other_list(pairs, 120)
    images = ("--images", pairs.parent)
    monkeypatch.chdir(pairs.parent)
    printed(capsys, run.folder, "--pairs", "pairs.csv", *images)
    monkeypatch.chdir(other.parent)
    assert f"it replaces a report on 240 other pairs, of {pairs}" in printed(
        capsys, run.folder, "--pairs", "pairs.csv", *images
    )


@pytest.mark.parametrize("name", ["lfw-deepfunneled", "lfw_funneled", "lfw"])
def test_lfw_is_found_in_the_data_folder(capsys: Capture, tmp_path: Path, name: str):
    run = color_run(tmp_path / "run", tmp_path / "images")
    lfw = lfw_folder(tmp_path / "data" / name, PEOPLE)
    found = [answer(capsys, "verify", run.folder, "--data-dir", folder) for folder in (lfw, tmp_path / "data")]
    assert found[0] == found[1]
    assert found[1]["data"]["images"] == str(lfw)
    (lfw / "pairsDevTest.txt").rename(tmp_path / "data" / "pairsDevTest.txt")
    options = ("--data-dir", tmp_path / "data", "--lfw-list", "pairsDevTest")
    assert answer(capsys, "verify", run.folder, *options)["data"]["pairs"] == 4


def test_too_few_pairs_create_no_folder(capsys: Capture, run: Run, pairs: Path, tmp_path: Path):
    few = listed(pairs.parent / "few.csv", [("0.png", "1.png", True), ("2.png", "3.png", False)])
    message = complaint(capsys, "verify", run.folder, "--pairs", few, "--out", tmp_path / "new" / "x.png")
    assert "folds need two pairs or more" in message
    assert not (tmp_path / "new").exists()


def test_image_outside_of_class_folders_counts_as_unseen(capsys: Capture, run: Run, pairs: Path):
    found = answer(capsys, "verify", run.folder, "--pairs", pairs, "--unseen")
    assert found["data"]["left_out"] == 0
    # Class 3 of the digits, by the name of its folder.
    (pairs.parent / "3").mkdir()
    (pairs.parent / "0.png").rename(pairs.parent / "3" / "0.png")
    rows = [("3/0.png", "1.png", False), ("3/0.png", "2.png", True)] + [("1.png", "2.png", True)] * 2
    some = listed(pairs.parent / "some.csv", [*rows, ("4.png", "5.png", False), ("4.png", "6.png", False)])
    (note,) = answer(capsys, "verify", run.folder, "--pairs", some)["data"]["notes"]
    assert note.startswith("2 of 6 pairs show a class that the run was trained on")
    assert answer(capsys, "verify", run.folder, "--pairs", some, "--unseen")["data"]["left_out"] == 2


def test_report_notes_mirror_images_that_the_calibration_lacks(capsys: Capture, run: Run, pairs: Path):
    report = ("verify", run.folder, "--pairs", pairs)
    assert answer(capsys, *report)["flip_note"] == ""
    answer(capsys, *report, "--calibrate", "--no-flip")
    note = "the run is calibrated without mirror images, and this report has them: see --no-flip"
    assert answer(capsys, *report)["flip_note"] == note
    assert f"note: {note}" in printed(capsys, *report[1:])
    assert answer(capsys, *report, "--no-flip")["flip_note"] == ""
    answer(capsys, *report, "--calibrate")
    assert answer(capsys, *report)["flip_note"] == ""
    note = "the run is calibrated with mirror images, and this report leaves them out: omit --no-flip"
    assert answer(capsys, *report, "--no-flip")["flip_note"] == note
    (run.folder / "verification.json").write_text("{")
    assert answer(capsys, *report, "--no-flip")["flip_note"] == ""


def test_folds_of_a_list_that_share_people_are_reported():
    """Person 0 is in two folds of the second list."""
    rows = [("a", "b", True), ("a", "c", False), ("d", "e", True), ("d", "f", False)]
    pairs = Pairs.of_names(rows, [0, 0, 1, 1])
    for people, note in (
        (torch.tensor([0, 0, 1, 2, 2, 3]), ""),
        (torch.tensor([0, 0, 1, 2, 2, 0]), "people who are in two folds of the list or more: 1"),
    ):
        found = Folds.by_people(pairs, people)
        assert (found.numbers.tolist(), found.note) == ([0, 0, 1, 1], note)
    assert Folds.by_people(pairs, None).note == ""


def test_list_with_one_fold_is_reported_as_such():
    rows = [("a", "b", True), ("a", "c", True), ("b", "d", False), ("c", "d", False)]
    found = Folds.of(Pairs.of_names(rows, [0, 0, 0, 0]))
    assert found.note == "the folds are random, since all pairs are in one fold of the list"
