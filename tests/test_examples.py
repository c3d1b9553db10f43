"""The examples run from the command line, and name the extras that they need."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread, because tests run in parallel.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_extras_named_by_examples_exist():
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    needs = [re.findall(r"Needs the extras? ([^.,]*)", script.read_text()) for script in EXAMPLES.glob("*.py")]
    named = {name for found in needs for text in found for name in re.findall(r"`(\w+)`", text)}
    assert named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.slow
def test_int8_keeps_the_accuracy_of_a_folded_network(tmp_path):
    out = tmp_path / "int8.json"
    done = run(EXAMPLES / "quantize_int8.py", "--operator", "tanh-cos", "--epochs", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert {"commit", "environment"} <= set(record)
    row = record["rows"]["tanh-cos"]
    assert abs(row["int8"]["test_accuracy"] - row["float32"]["test_accuracy"]) < 3
    assert row["int8"]["bytes"] < row["float32"]["bytes"] / 2


@pytest.mark.slow
def test_custom_magnitude_passes_its_checks_and_trains():
    done = run(EXAMPLES / "custom_magnitude.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(accuracy) for accuracy in re.findall(r"test accuracy (\S+) %", done.stdout)]
    assert len(accuracies) == 2
    assert min(accuracies) > 90
