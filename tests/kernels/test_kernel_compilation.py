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
    """The names of the kernels compiled by a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {line.split()[0] for line in result.stdout.splitlines() if line.endswith("bytes shared")}


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_kernels_compile_for_hopper(half):
    assert len(compile_offline(*[*one_of_each(), "linear-cos", LEARNING][half::2])) >= 19


def test_kernels_compile_for_ampere():
    assert len(compile_offline("--capability", "80", "--half-only", LEARNING)) >= 19
