"""What docs/extending.md and docs/reproducing.md add to the repository is found there by the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.docs_pages import ROOT, blocks

# The heading, the file that its first block goes into, and what then tells of it.
ADDED = {
    "A magnitude": ("magnitude.py", ("list operators", "fraction")),
    "An angle": ("angle.py", ("list operators", "cubic")),
    "A margin": ("losses/margins.py", ("list margins", "both")),
    "A network": ("models/tiny.py", ("list models", "tiny")),
    "An attack": ("robustness/noise.py", None),
    "A dataset": ("data/shades.py", ("list datasets", "shades")),
    "An experiment": ("experiments/catalogue/own.py", ("reproduce digits_by_operator --status", "after an epoch")),
}


def first_blocks(page: Path) -> dict[str, str]:
    """The first block of Python below each heading."""
    lines, found = page.read_text().splitlines(), {}
    for block in blocks(page, "python"):
        heading = next(line for line in reversed(lines[: block.line]) if re.match("#+ ", line))
        found.setdefault(heading.lstrip("# "), block.code)
    return found


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with all that the pages add to it."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "dcnet", root / "dcnet", ignore=shutil.ignore_patterns("__pycache__"))
    code = first_blocks(ROOT / "docs" / "extending.md")
    for heading, (file, _) in ADDED.items():
        with (root / "dcnet" / file).open("a") as added:
            added.write("\n\n" + code[heading])
    (widths,) = (block.code for block in blocks(ROOT / "docs" / "reproducing.md", "python"))
    (root / "dcnet/experiments/catalogue/widths.py").write_text(widths)
    return root


# Prints a line for each command, and what it prints after it, in one process, since each takes seconds to import torch.
SCRIPT = """
import json, sys
from dcnet.cli.app import main
for words in json.loads(sys.argv[1]):
    print("$", words, flush=True)
    assert main(words.split()) == 0
import dcnet.robustness.attacks as attacks
print("$ attack", attacks.noise)
"""
COMMANDS = list(dict.fromkeys([tells[0] for _, tells in ADDED.values() if tells] + ["reproduce widths --status"]))


@pytest.fixture(scope="module")
def outputs(extended: Path) -> dict[str, str]:
    """What the commands print in the extended copy."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
    environment = {**os.environ, "PYTHONPATH": str(extended)}
    done = subprocess.run(
        command, cwd=extended, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    parts = (part.partition("\n") for part in done.stdout.split("$ ")[1:])
    return {words: printed for words, _, printed in parts}


@pytest.mark.parametrize(("words", "expected"), [tells for _, tells in ADDED.values() if tells])
def test_an_extension_of_the_page_is_listed(outputs: dict[str, str], words: str, expected: str):
    assert expected in outputs[words]


def test_an_experiment_of_reproducing_is_listed(outputs: dict[str, str]):
    assert "Digits, test error in %" in outputs["reproduce widths --status"]


def test_a_custom_attack_is_a_function(outputs: dict[str, str]):
    assert any(words.startswith("attack <function noise") for words in outputs)
