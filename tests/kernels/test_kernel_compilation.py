"""Every kernel compiles for GPUs that are not installed: the interpreter accepts code that the compiler rejects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.kernel_comparison import one_of_each

SCRIPT = Path(__file__).parents[1] / "helpers" / "compile_offline.py"
LEARNING = "seg(learnable=True)-sigmoid(learnable=True)+product"


def compile_offline(*arguments):
    """The kernels compiled by a process without the interpreter, and the bytes of shared memory of each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split() for line in result.stdout.splitlines() if line.endswith("bytes shared")]
    return {name: int(shared) for name, shared, *_ in lines}


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_kernels_compile_for_hopper(half):
    assert len(compile_offline(*[*one_of_each(), "linear-cos", LEARNING][half::2])) >= 24


def test_kernels_compile_for_ampere():
    found = compile_offline("--capability", "80", "--half-only", LEARNING)
    assert len(found) >= 24
    # GPUs of compute capability 8.6, 8.9 and 12.0 have no more shared memory for a program.
    assert max(found.values()) <= 99 * 1024
