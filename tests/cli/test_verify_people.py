"""`dcnet verify` on a folder of people: reports, calibration, norms, features, and errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli_runs import answer, call, complaint
from PIL import Image

from dcnet.data import load_dataset
from dcnet.training import Run, load_model
from dcnet.verification import PeopleBootstrap, all_pairs, fold_accuracy, fold_transfer, pair_scores, roc
from dcnet.verification.folds import Folds

pytestmark = pytest.mark.usefixtures("without_pictures")
Capture = pytest.CaptureFixture[str]
# Two people for each class of the digits, of which one has no image.
PEOPLE, IMAGES = 19, 100


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return written(tmp_path / "photos", 0)


def written(folder: Path, start: int) -> Path:
    """Test images of the digits: two "people" for each class, p00 to p19."""
    test = load_dataset("digits").test
    for place in range(start, start + IMAGES):
        person = folder / f"p{2 * int(test.labels[place]) + place % 2:02d}"
        person.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test.images[place, 0].numpy()).save(person / f"{place:03d}.png")
    return folder


def known_scores(run: Run, folder: Path):
    """Embeddings, labels, pairs and scores of the images of a folder, computed without the command."""
    files = sorted(folder.glob("*/*.png"))
    pixels = torch.from_numpy(np.stack([np.array(Image.open(file)) for file in files]))[:, None].float() / 255
    model = load_model(run)[0]
    with torch.no_grad():
        embeddings = model.features(pixels) + model.features(pixels.flip(-1))
    labels = torch.tensor([int(file.parent.name[1:]) for file in files])
    pairs = all_pairs(labels)
    return embeddings, labels, pairs, pair_scores(embeddings, pairs.first, pairs.second)


def test_report_uses_all_pairs_and_folds_without_shared_people(capsys: Capture, run: Run, people: Path):
    found = answer(capsys, "verify", run.folder, "--people", people)
    _, labels, pairs, scores = known_scores(run, people)
    both = labels[pairs.first], labels[pairs.second]
    assert (found["data"]["pairs"], found["data"]["files"]) == (IMAGES * (IMAGES - 1) // 2, IMAGES)
    assert found["data"]["people"] == len(labels.unique())
    folds = Folds.by_people(pairs, labels)
    inside = folds.numbers >= 0
    assert found["folds"] == len(folds.numbers[inside].unique()) > 1
    assert found["pairs_in_folds"] == int(inside.sum())
    assert f"the {int((~inside).sum()):,} pairs of people of two folds" in found["fold_note"]
    wanted = fold_accuracy(scores[inside], pairs.same[inside], folds.numbers[inside], balanced=True)
    assert found["balanced_accuracy"]["mean"] == pytest.approx(wanted.mean, abs=1e-3)
    assert found["auc"] == pytest.approx(roc(scores, pairs.same).auc(), abs=1e-5)
    low, high = PeopleBootstrap(scores, *both).tar_at_far([0.1])[0]
    at = found["tar_at_far"][0]
    assert (at["low"], at["high"]) == pytest.approx((low, high), abs=2e-3)
    assert at["low"] < at["tar"] < at["high"]
    moved = fold_transfer(scores[inside], pairs.same[inside], folds.numbers[inside], 0.1)
    assert (found["transfer"][0]["far"], found["transfer"][0]["tar"]) == pytest.approx((moved.far, moved.tar), abs=2e-3)


def test_report_is_printed(capsys: Capture, run: Run, people: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(next(people.glob("*/*.png")), people / "stray.png")
    assert call("verify", run.folder, "--people", people) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        f"4,950 pairs, 256 same and 4,694 different, of {people} (100 images of 19 people)",
        "95 % intervals by a bootstrap over 19 people",
        "Thresholds from other pairs",
        "Norms as quality: from",
        "without the 10 % of lowest norm",
        f"note: images directly in {people}, not in the folder of a person, are not used: 1 of them",
        "as 'people-photos'",
    ):
        assert words in text
    # With so many more different pairs, always answering "different" has a high accuracy.
    assert "│ accuracy" not in text
    assert "│ balanced accuracy, " in text


def test_thresholds_of_other_people_are_applied(
    capsys: Capture, run: Run, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    report = ("verify", run.folder, "--people")
    assert answer(capsys, *report, people)["calibrated"] is None
    kept = answer(capsys, *report, people, "--calibrate", "--far", "0.05", "--frr", "0.1")
    for rate in ("far", "frr"):
        low, high = kept["data"]["intervals"][rate]
        assert low < kept["decision"][rate] < high
    assert answer(capsys, *report, people)["calibrated"]["same_pairs"] is True
    others = written(tmp_path / "others", IMAGES)
    found = answer(capsys, *report, others)["calibrated"]
    _, _, pairs, scores = known_scores(run, others)
    accepted = scores >= kept["decision"]["upper"]
    assert (found["same_pairs"], found["list"], found["wanted_far"]) == (False, str(people), 0.05)
    assert found["far"] == pytest.approx(accepted[~pairs.same].double().mean().item(), abs=1e-3)
    assert found["tar"] == pytest.approx(accepted[pairs.same].double().mean().item(), abs=1e-2)
    assert found["loss"] == pytest.approx(found["own_tar"] - found["tar"])
    # Scores with other mirror images have no calibrated threshold.
    assert answer(capsys, *report, others, "--no-flip")["calibrated"] is None
    assert call(*report, others) == 0
    assert "the calibration on " in capsys.readouterr().out
    assert call(*report, people, "--calibrate", "--far", "0.05", "--frr", "0.1") == 0
    text = capsys.readouterr().out
    assert "too close to call: " in text
    assert "below the lower one: 95 % intervals by a bootstrap over 19 people" in text


def test_scores_can_be_corrected_for_norms(capsys: Capture, run: Run, people: Path):
    kept = answer(capsys, "verify", run.folder, "--people", people, "--calibrate", "--by-norm", "--far", "0.05")
    embeddings, _, pairs, scores = known_scores(run, people)
    norms = torch.linalg.vector_norm(embeddings, dim=1).double()
    files = sorted(people.glob("*/*.png"))
    found = answer(capsys, "verify", run.folder, files[0], files[7])
    cosine = torch.cosine_similarity(embeddings[0], embeddings[7], dim=0).item()
    assert found["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert found["norms"] == pytest.approx(norms[[0, 7]].tolist(), rel=1e-4)
    quality = kept["quality"]
    wanted = cosine + quality["weight"] * (norms[[0, 7]].min().log().item() - quality["center"])
    assert found["score"] == pytest.approx(wanted, abs=1e-4)
    smaller = torch.minimum(norms[pairs.first], norms[pairs.second]).log()
    corrected = scores.double() + quality["weight"] * (smaller - quality["center"])
    accepted = (corrected >= kept["decision"]["upper"])[~pairs.same]
    assert accepted.double().mean().item() == pytest.approx(kept["decision"]["far"], abs=1e-3)
    assert call("verify", run.folder, files[0], files[7]) == 0
    text = capsys.readouterr().out
    assert f"the cosine is {cosine:.3f}, and {found['score']:.3f} corrected for norms" in text
    assert "scores are cosines corrected for norms" in text


def test_features_are_exported_with_norms(capsys: Capture, run: Run, people: Path, tmp_path: Path):
    file = tmp_path / "new" / "features.npz"
    answer(capsys, "verify", run.folder, "--people", people, "--export", file)
    embeddings, labels, *_ = known_scores(run, people)
    with np.load(file) as kept:
        assert kept["features"] == pytest.approx(embeddings.numpy(), abs=1e-4)
        assert kept["norms"] == pytest.approx(np.linalg.norm(kept["features"], axis=1), rel=1e-5)
        assert kept["people"].tolist() == [f"p{label:02d}" for label in labels]
        assert kept["names"].tolist() == [f"{path.parent.name}/{path.name}" for path in sorted(people.glob("*/*.png"))]
        assert len(str(kept["weights"])) == 64
    file.unlink()
    assert call("verify", run.folder, "--people", people, "--calibrate", "--export", file) == 0
    assert f"wrote {file}" in "".join(capsys.readouterr().out.splitlines())
    assert file.exists()


def test_same_image_of_two_people_is_reported(capsys: Capture, run: Run, people: Path):
    assert answer(capsys, "verify", run.folder, "--people", people)["twin_note"] == ""
    image = sorted(people.glob("p00/*.png"))[0]
    shutil.copy(image, people / "p19" / "copy.png")
    found = answer(capsys, "verify", run.folder, "--people", people)["twin_note"]
    names = f"p00/{image.name} and p19/copy.png"
    assert found == f"different people with nearly equal images: {names}; check whether they are the same person"


def test_people_of_the_training_set_are_left_out(capsys: Capture, run: Run, people: Path):
    # Class 3 of the run, by the name of a folder.
    (people / "p06").rename(people / "3")
    report = ("verify", run.folder, "--people", people)
    found = answer(capsys, *report)["data"]
    assert "show a class that the run was trained on" in found["notes"][0]
    kept = answer(capsys, *report, "--unseen")["data"]
    assert kept["people"] == PEOPLE - 1
    assert kept["left_out"] == found["pairs"] - kept["pairs"] > 0


def test_few_people_share_folds(capsys: Capture, run: Run, people: Path):
    for person in sorted(people.iterdir())[3:]:
        shutil.rmtree(person)
    found = answer(capsys, "verify", run.folder, "--people", people)
    assert found["fold_note"] == "the folds are random and share people, since there are too few people"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--people", "none"], "there is no folder 'none': expected one with a folder of images for each person"),
        (["--people", "EMPTY"], "has no images: expected a folder of images for each person"),
        (["--people", "EMPTY", "--pairs", "p.csv"], "--people and --pairs exclude each other: give one of them"),
        (["--people", "EMPTY", "--by-norm"], "--by-norm is only for --calibrate"),
        (["a.png", "b.png", "--export", "a.npz"], "--export is only for --people, --pairs or --lfw"),
        (["--people", "PHOTOS", "--export", "a.csv"], "--export must be a file such as .npz, not 'a.csv'"),
        (["--people", "PHOTOS", "--lfw-list", "pairs"], "--lfw-list needs --lfw"),
    ],
)
def test_invalid_options_are_rejected(
    capsys: Capture, run: Run, people: Path, tmp_path: Path, options: list[str], message: str
):
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": tmp_path / "empty", "PHOTOS": people}
    given = [str(places.get(option, option)) for option in options]
    assert message in complaint(capsys, "verify", run.folder, *given)
    assert not (run.folder / "verification.json").exists()


def test_broken_image_is_named(capsys: Capture, run: Run, people: Path):
    broken = people / "p00" / "broken.png"
    broken.write_text("no image")
    assert f"{str(broken)!r} cannot be read as an image: " in complaint(
        capsys, "verify", run.folder, "--people", people
    )


def test_json_has_no_invalid_numbers(capsys: Capture, run: Run, people: Path):
    assert call("verify", run.folder, "--people", people, "--json") == 0
    text = capsys.readouterr().out
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
