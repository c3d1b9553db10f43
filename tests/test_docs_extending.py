"""The command line finds the code of docs/extending.md and docs/reproducing.md after it is added to the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.docs_pages import ROOT, blocks

# By heading: the file that its first block is added to, a command that then lists it, and a part of the output.
ADDED = {
    "A magnitude": ("magnitude.py", ("list operators", "fraction")),
    "An angle": ("angle.py", ("list operators", "cubic")),
    "A margin": ("losses/cosine_margins.py", ("list margins", "both")),
    "A network": ("models/tiny.py", ("list models", "tiny")),
    "An attack": ("robustness/noise.py", None),
    "A dataset": ("data/shades.py", ("list datasets", "shades")),
    "An experiment": ("experiments/catalogue/own.py", ("reproduce digits_by_operator --status", "after an epoch")),
}


def first_blocks(page: Path) -> dict[str, str]:
    """The first Python block below each heading."""
    lines, found = page.read_text().splitlines(), {}
    for block in blocks(page, "python"):
        heading = next(line for line in reversed(lines[: block.line]) if re.match("#+ ", line))
        found.setdefault(heading.lstrip("# "), block.code)
    return found


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the code of the pages."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "dcnet", root / "dcnet", ignore=shutil.ignore_patterns("__pycache__"))
    code = first_blocks(ROOT / "docs" / "extending.md")
    for heading, (file, _) in ADDED.items():
        with (root / "dcnet" / file).open("a") as added:
            added.write("\n\n" + code[heading])
    code_blocks = [block.code for block in blocks(ROOT / "docs" / "reproducing.md", "python")]
    (widths,) = (code for code in code_blocks if "def widths()" in code)
    (root / "dcnet/experiments/catalogue/widths.py").write_text(widths)
    return root


# Prints each command and its output. One process runs all commands, since importing torch takes seconds.
SCRIPT = """
import json, sys
from dcnet.cli.app import main
for words in json.loads(sys.argv[1]):
    print("$", words, flush=True)
    assert main(words.split()) == 0
import dcnet.robustness.attacks as attacks
print("$ attack", attacks.noise)
"""
LISTED = [listed for _, listed in ADDED.values() if listed]
COMMANDS = list(dict.fromkeys([command for command, _ in LISTED] + ["reproduce widths --status"]))


@pytest.fixture(scope="module")
def outputs(extended: Path) -> dict[str, str]:
    """The outputs of the commands in the extended copy."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
    environment = {**os.environ, "PYTHONPATH": str(extended)}
    done = subprocess.run(
        command, cwd=extended, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    parts = (part.partition("\n") for part in done.stdout.split("$ ")[1:])
    return {words: printed for words, _, printed in parts}


@pytest.mark.parametrize(("words", "expected"), LISTED)
def test_extension_is_listed(outputs: dict[str, str], words: str, expected: str):
    assert expected in outputs[words]


def test_experiment_of_reproducing_is_listed(outputs: dict[str, str]):
    assert "Digits, test error in %" in outputs["reproduce widths --status"]


def test_custom_attack_is_a_function(outputs: dict[str, str]):
    assert any(words.startswith("attack <function noise") for words in outputs)
