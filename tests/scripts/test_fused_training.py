"""The comparison of training with and without fused blocks; on a CPU there are no fused blocks, so both are equal."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fused_training.py"


@pytest.mark.slow
def test_both_are_equal_without_a_gpu():
    words = ["--operators", "linear-cos", "--steps", "4", "--seeds", "2", "--jobs", "2"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    head, row = (line.split() for line in done.stdout.splitlines())
    assert (head[0], row[0], row[-1]) == ("operator", "linear-cos", "1.00")
    assert row[1:4] == row[4:7]
    assert row[7:10] == row[10:13]
