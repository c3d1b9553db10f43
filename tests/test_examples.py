"""The examples run as they are run by a reader."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: tests run side by side.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_own_magnitude_is_checked_and_trains():
    done = run(EXAMPLES / "own_magnitude.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(line.split()[1]) for line in done.stdout.splitlines() if line.endswith("test images")]
    assert len(accuracies) == 2
    assert min(accuracies) > 90
