"""`dcnet attack`: the report card of a run, its storage in the record, and wrong input."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import answer, call, color_run, complaint, trained
from PIL import Image

from dcnet.data import load_dataset
from dcnet.files import write_json
from dcnet.robustness import accuracy, attacks, report_card, subject
from dcnet.robustness.report_card import measurements
from dcnet.robustness.subject import Effort
from dcnet.training import Run, load_model
from dcnet.training.tensor_files import read_tensors, write_tensors

Capture = pytest.CaptureFixture[str]
QUICK = ("--quick", "--images", "30", "--device", "cpu")
NAME = "attack-8/255-30-images-quick"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch):
    """Uses weaker attacks, since these tests measure many cards."""
    monkeypatch.setattr(subject, "QUICK", Effort(steps=3, restarts=1, bim_steps=3, queries=5, autoattack=False))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "copied"))


@pytest.fixture
def source(tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained()["conv"].folder, tmp_path / "plain"))


def test_attack_stores_the_card_of_the_library(capsys: Capture, run: Run, source: Run):
    found = answer(capsys, "attack", run.folder, "--source", source.folder, *QUICK)
    test, (model, _) = load_dataset("digits").test.subset(30, 10), load_model(run)
    x, y = test.images, test.labels
    results = found["results"]
    assert list(results) == list(measurements)
    assert results["clean"] | {"seconds": 0} == {
        "accuracy": accuracy(model, x, y),
        "images": 30,
        "classes": 10,
        "seconds": 0,
    }
    expected = accuracy(model, attacks.pgd(model, x, y, epsilon=8 / 255, steps=3), y)
    assert results["pgd"]["accuracy"] == expected
    made = attacks.fgsm(model, x, y, epsilon=8 / 255, source=load_model(source)[0])
    assert results["transfer"]["accuracies"]["fgsm"] == accuracy(model, made, y)
    assert results["transfer"]["source"]["run"] == "plain"
    assert results["smoothed_pgd"]["layers"] == 10
    kept = run.record().evaluations[NAME].to_json()
    assert kept == {key: value for key, value in found.items() if key not in ("run", "written")}
    assert (found["run"], found["network"]) == ("copied", "digits, cnn9-small, tanh-cos")
    assert found["settings"]["epsilon"] == 8 / 255
    assert run.record().results == trained()["tanh-cos"].record().results


def test_attack_prints_the_card_and_writes_it_as_markdown(capsys: Capture, run: Run, tmp_path: Path):
    page = tmp_path / "cards" / "digits.md"
    assert call("attack", run.folder, "--epsilon", "0.1", "--report", page, *QUICK) == 0
    output = capsys.readouterr()
    text = page.read_text()
    for words in (
        "FGSM",
        "BIM",
        "PGD",
        "Square",
        "AutoAttack",
        "is left out of a quick card",
        "contrast",
        "severity 5",
    ):
        assert words in output.out
        assert words in text
    verdict = run.record().evaluations["attack-25.5/255-30-images-quick"].extra["verdict"]["words"]
    assert all(sentence in output.out for sentence in verdict)
    assert all(f"- {sentence}\n" in text for sentence in verdict)
    assert output.out.endswith(
        f"wrote {page}\nwrote {page.parent}/digits-accuracy.png\nwrote {page.parent}/digits-loss.png\n"
    )
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert sorted(pictures) == ["digits-accuracy.png", "digits-loss.png"]
    for picture in pictures:
        with Image.open(page.parent / picture) as opened:
            assert min(opened.size) > 600
    assert "pgd: " in output.err
    assert f"`dcnet attack {run.folder} --device cpu --images 30 --epsilon 0.1 --quick --report {page}`" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_interrupted_attack_resumes(capsys: Capture, run: Run, monkeypatch: pytest.MonkeyPatch):
    def interrupted(given: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setitem(measurements, "bim", interrupted)
        assert call("attack", run.folder, *QUICK) == 130
    output = capsys.readouterr()
    assert output.out == ""
    last = output.err.splitlines()[-1]
    again = f"dcnet attack {run.folder} --device cpu --images 30 --quick"
    assert last == f"dcnet: interrupted; the measurements are stored, resume with: {again}"
    kept = run.record().evaluations[NAME].to_json()
    assert list(kept["results"]) == ["clean", "gradients", "surface", "fgsm"]
    assert "verdict" not in kept

    started: list[str] = []
    usual = report_card.report_card
    monkeypatch.setattr(
        report_card, "report_card", lambda given, done, begins, ends: usual(given, done, started.append, ends)
    )
    found = answer(capsys, "attack", run.folder, *QUICK)
    assert started == list(measurements)[4:]
    assert found["results"]["fgsm"] == kept["results"]["fgsm"]
    assert "verdict" in run.record().evaluations[NAME].extra


def test_other_weights_and_sources_are_measured_again(capsys: Capture, run: Run, source: Run):
    first = answer(capsys, "attack", run.folder, "--source", source.folder, *QUICK)
    call("attack", run.folder, *QUICK)
    assert "12 of 13 measurements are already in the record" in capsys.readouterr().err
    own = answer(capsys, "attack", run.folder, "--source", run.folder, *QUICK)
    assert own["results"]["transfer"]["source"]["run"] == "copied"
    assert own["results"]["transfer"]["accuracies"] != first["results"]["transfer"]["accuracies"]
    assert own["results"]["square"] == first["results"]["square"]
    tensors, notes = read_tensors(run.model_file)
    write_tensors(run.model_file, {name: value * 0.7 for name, value in tensors.items()}, notes)
    assert call("attack", run.folder, *QUICK) == 0
    assert "are already in the record" not in capsys.readouterr().err


def test_other_images_are_measured_again(capsys: Capture, tmp_path: Path):
    run, images = color_run(tmp_path / "run", tmp_path / "images"), tmp_path / "images"
    options = (run.folder, "--data-dir", images, "--workers", "0", *QUICK)
    first = answer(capsys, "attack", *options)
    again = answer(capsys, "attack", *options)
    assert again["results"]["clean"] == first["results"]["clean"]
    Image.new("RGB", (11, 9), "red").save(images / "val" / "dark" / "0.png")
    other = answer(capsys, "attack", *options)
    assert other["results"]["surface"]["gradient"] != first["results"]["surface"]["gradient"]
    assert "are already in the record" not in capsys.readouterr().err


def test_missing_optional_package_gives_a_one_line_error(capsys: Capture, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    monkeypatch.setattr(subject, "STANDARD", Effort(steps=2, restarts=1))
    # Wide enough for a sentence per line.
    monkeypatch.setenv("COLUMNS", "200")
    assert call("attack", run.folder, "--images", "20", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert out.count("needs the package pyautoattack: install dcnet with its extra, dcnet[robustness]") >= 2
    assert "Trust these numbers with care" in out


def test_read_only_run_can_be_attacked(capsys: Capture, run: Run, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "record.json")

    monkeypatch.setattr("dcnet.training.add_evaluation", denied)
    assert call("attack", run.folder, *QUICK) == 0
    out = capsys.readouterr().out
    assert "note: the card is not stored in the record: [Errno 13] Permission denied: 'record.json'" in out
    assert "stored in /" not in out


def test_evaluate_reads_a_folder_of_images(capsys: Capture, tmp_path: Path):
    run, images = color_run(tmp_path / "run", tmp_path / "images"), tmp_path / "images"
    options = ("--data-dir", images, "--workers", "0", "--device", "cpu", "--quick")
    assert answer(capsys, "attack", run.folder, "--images", "4", *options)["settings"]["images"] == 4
    assert answer(capsys, "attack", run.folder, *options)["settings"]["images"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epsilon", "8"), "--epsilon must be above 0 and at most 1, since pixels are in [0, 1], not 8"),
        (("--epsilon", "0"), "--epsilon must be above 0 and at most 1"),
        (("--epsilon", "-1/255"), "--epsilon must be above 0 and at most 1"),
        (("--epsilon", "nan"), "--epsilon must be above 0 and at most 1"),
        (("--epsilon", "8/0"), "--epsilon must be a number or a fraction such as 8/255, not '8/0'"),
        (("--epsilon", "much"), "--epsilon must be a number or a fraction such as 8/255, not 'much'"),
        (("--images", "0"), "--images must be 1 or more, not 0"),
        (("--report", "card.txt"), "--report must be a file such as .md, not 'card.txt'"),
        (("--source", "nowhere"), "there is no run 'nowhere'"),
    ],
)
def test_wrong_options_give_a_one_line_error(capsys: Capture, run: Run, options: tuple[str, ...], message: str):
    assert message in complaint(capsys, "attack", run.folder, *options, "--device", "cpu")


def test_source_with_other_classes_is_rejected(capsys: Capture, run: Run, source: Run, tmp_path: Path):
    color = color_run(tmp_path / "color", tmp_path / "images")
    message = complaint(capsys, "attack", run.folder, "--source", color.folder, *QUICK)
    assert "source 'color' was trained on 2 classes, dark, light, and not on the 10 of the run, 0, 1, 2, ..." in message
    record = source.record()
    record.data.channels = 3
    source.write(record)
    message = complaint(capsys, "attack", run.folder, "--source", source.folder, *QUICK)
    assert "source 'plain' takes images of 8 pixels and 3 channels, not of 8 pixels and 1 channels" in message
    write_json(source.record_file, {key: value for key, value in record.to_json().items() if key != "data"})
    message = complaint(capsys, "attack", run.folder, "--source", source.folder, *QUICK)
    assert "does not describe its network: it lacks data.classes" in message


def test_run_without_weights_is_rejected(capsys: Capture, run: Run):
    run.model_file.unlink()
    assert "the run 'copied' is done, but its weights are missing" in complaint(capsys, "attack", run.folder, *QUICK)


def test_network_with_another_pixel_range_is_rejected(capsys: Capture, run: Run):
    """Its weights expect pixels in [0, 255]."""
    tensors, notes = read_tensors(run.model_file)
    (deviation,) = [name for name in tensors if name.endswith(".std")]
    write_tensors(run.model_file, tensors | {deviation: 255 * tensors[deviation]}, notes)
    message = complaint(capsys, "attack", run.folder, *QUICK)
    assert "the network takes pixels from 0 to 255, not from 0 to 1" in message
    assert torch.equal(read_tensors(run.model_file)[0][deviation], 255 * tensors[deviation])
