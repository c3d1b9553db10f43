"""The examples run as they are run by a reader."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: tests run side by side.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_the_extras_that_examples_need_are_there():
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    needs = [re.findall(r"Needs the extras? ([^.,]*)", script.read_text()) for script in EXAMPLES.glob("*.py")]
    named = {name for found in needs for text in found for name in re.findall(r"`(\w+)`", text)}
    assert named
    assert named <= set(project["optional-dependencies"])


def test_own_magnitude_is_checked_and_trains():
    done = run(EXAMPLES / "own_magnitude.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(line.split()[1]) for line in done.stdout.splitlines() if line.endswith("test images")]
    assert len(accuracies) == 2
    assert min(accuracies) > 90
