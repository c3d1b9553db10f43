"""Names from files on the terminal and in plots: control characters and markup have no effect."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cli_runs import call, trained
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from dcnet.report.curves import run_curves
from dcnet.report.drawing import literal
from dcnet.report.feature_plots import feature_plots
from dcnet.report.features import Features
from dcnet.terminal import print_json, visible
from dcnet.training import Run

Capture = pytest.CaptureFixture[str]
# A window title, red text, a color by one byte, and text from right to left.
CONTROLS = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202e\r"
ESCAPED = r"\x1b]0;owned\x07\x1b[31m\x9b31m\u202e\r"
EQUATION = "$x^2$ or $"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose class names have control characters."""
    copied = Run(tmp_path / "runs" / "copied")
    shutil.copytree(trained()["conv"].folder, copied.folder)
    record = copied.record()
    record.data.classes = [f"{CONTROLS}{i}" for i in range(10)]
    copied.write(record)
    return copied


def seen(capsys: Capture, *words: object) -> str:
    call(*words)
    output = capsys.readouterr()
    for char in CONTROLS:
        assert char not in output.out + output.err or char.isprintable()
    return output.out + output.err


def test_control_characters_are_escaped():
    assert visible(f"a{CONTROLS}b") == f"a{ESCAPED}b"
    assert visible("\ud800 \u2028 \0") == r"\ud800 \u2028 \x00"
    assert visible("grün, 猫, ‖w‖ ± 1 \\x1b") == "grün, 猫, ‖w‖ ± 1 \\x1b"
    assert visible("two\nlines", kept="\n") == "two\nlines"


def test_commands_show_the_names_of_classes(run: Run, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "digit.png")
    assert ESCAPED in seen(capsys, "predict", run.folder, tmp_path / "digit.png")
    found = json.loads(seen(capsys, "predict", run.folder, tmp_path / "digit.png", "--json"))
    assert found[0]["classes"][0]["class"].startswith(CONTROLS)
    assert ESCAPED in seen(capsys, "evaluate", run.folder)


def test_names_of_folders_are_class_names(run: Run, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    moved = run.folder.rename(run.folder.with_name(f"a{CONTROLS}"))
    assert ESCAPED in seen(capsys, "list", "runs", "--runs", moved.parent)
    assert "owned" in seen(capsys, "list", "runs", "--runs", moved.parent, "--json")
    assert ESCAPED in seen(capsys, "plot", "curves", moved)
    (moved / "record.json").write_text("{")
    assert ESCAPED in seen(capsys, "report", "--runs", moved.parent, "--out", tmp_path / "page.html")
    assert "owned" in seen(capsys, "list", "runs", "--runs", moved.parent)
    assert "owned" in seen(capsys, "predict", moved, f"{CONTROLS}.png")


def test_json_keeps_letters_and_escapes_control_characters(capsys: Capture):
    value = {"name": f"grün {CONTROLS}\U000e0001"}
    print_json(value)
    text = capsys.readouterr().out
    assert "grün" in text
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


def drawn(figure: Figure) -> list[str]:
    """All texts of a picture that are not equations."""
    figure.canvas.draw()
    found = [text for text in figure.findobj(Text) if text.get_text()]
    return [string for text in found for string, math in [text._preprocess_math(text.get_text())] if math is not True]


def test_dollars_in_names_are_literal():
    points, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    panel = Features(f"title {EQUATION}", points, labels, (EQUATION, "$a$"), points)
    texts = drawn(feature_plots([panel]))
    assert texts.count(EQUATION) == 2
    assert texts.count("$a$") == 2
    assert any(text.startswith(f"title {EQUATION}") for text in texts)
    record = trained()["conv"].record()
    record.config["model"] = EQUATION
    other = dataclasses.replace(record, config=record.config | {"operator": "$b$"})
    texts = drawn(run_curves([record, other]))
    assert any(EQUATION in text for text in texts)
    assert "$b$" in texts


def test_components_without_a_formula_stay_fixed():
    assert literal("50 % ‖w‖") == "50 % ‖w‖"
