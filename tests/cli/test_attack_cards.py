"""Report cards of `dcnet attack`: names, progress messages, and a network with zero accuracy."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import answer, call, trained
from PIL import Image

from dcnet.cli.attack import Progress
from dcnet.robustness import subject
from dcnet.robustness.subject import Effort
from dcnet.robustness.task import format_epsilon
from dcnet.training import Run
from dcnet.training.tensor_files import read_tensors, write_tensors

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "QUICK", Effort(steps=2, restarts=1, bim_steps=2, queries=3, autoattack=False))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained()["tanh-cos"].folder, tmp_path / "copied"))


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (8 / 255, "8/255"),
        (51 / 255, "51/255"),
        (1.0, "1"),
        (0.1, "25.5/255"),
        (0.05, "0.05"),
        (0.0501, "0.0501"),
        (8.0000001 / 255, repr(8.0000001 / 255)),
    ],
)
def test_epsilon_in_the_command_parses_to_the_same_number(epsilon: float, words: str):
    assert format_epsilon(epsilon, exact=True) == words


def test_cards_of_close_epsilons_are_stored_separately(capsys: Capture, run: Run):
    options = ("--quick", "--images", "10", "--device", "cpu")
    for epsilon in ("0.05", "0.0501", "8/255"):
        answer(capsys, "attack", run.folder, "--epsilon", epsilon, *options)
    kept = run.record().evaluations
    names = {"attack-0.05-10-images-quick": 0.05, "attack-0.0501-10-images-quick": 0.0501}
    names["attack-8/255-10-images-quick"] = 8 / 255
    assert {name: kept[name].settings["epsilon"] for name in names} == names


@pytest.mark.parametrize(
    ("name", "found", "line"),
    [
        ("certified", {"accuracy": 0.9, "certified": 0.25}, "certified: 25.00 % (1.5 s)"),
        ("certified", {"accuracy": 0.9, "certified": 0.0}, "certified: 0.00 % (1.5 s)"),
        ("certified", {"skipped": "of a GELU"}, "certified: of a GELU (1.5 s)"),
        ("smoothed_pgd", {"accuracy": 0.5}, "smoothed pgd: 50.00 % (1.5 s)"),
        ("surface", {"amounts": []}, "surface: done (1.5 s)"),
    ],
)
def test_chart_describes_its_measurement(capsys: Capture, name: str, found: dict[str, Any], line: str):
    with Progress({}) as shown:
        shown.begins(name)
        shown.ends(name, {**found, "seconds": 1.5})
    assert capsys.readouterr().err == line + "\n"


def test_network_with_zero_accuracy_has_a_report(capsys: Capture, run: Run, tmp_path: Path):
    """The network always predicts 9, and the images are a 0 and a 1."""
    tensors, notes = read_tensors(run.model_file)
    (weight,) = [name for name in tensors if name.endswith("classifier.weight")]
    bias = weight.replace("weight", "bias")
    nine = torch.zeros_like(tensors[bias]).index_fill_(0, torch.tensor([9]), 1)
    write_tensors(run.model_file, tensors | {weight: torch.zeros_like(tensors[weight]), bias: nine}, notes)
    page = tmp_path / "zero.md"
    assert call("attack", run.folder, "--images", "2", "--quick", "--report", page, "--device", "cpu") == 0
    assert "Nothing to attack: accuracy 0.00 % on 2 clean images" in capsys.readouterr().out
    text = page.read_text()
    assert "| 0 | 0.00 |" in text
    for picture in re.findall(r"!\[.+\]\((.+)\)", text):
        with Image.open(page.parent / picture) as opened:
            assert min(opened.size) > 600
