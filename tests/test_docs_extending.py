"""What docs/extending.md and docs/reproducing.md add to the repository is found there by the command line."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks

# The heading, the file that its first block goes into, and what then tells of it.
ADDED = {
    "A magnitude": ("magnitude.py", ("list operators", "fraction")),
    "An angle": ("angle.py", ("list operators", "cubic")),
    "A margin": ("losses/margins.py", ("list margins", "both")),
    "A network": ("models/tiny.py", ("list models", "tiny")),
    "An attack": ("robustness/methods/noise.py", None),
    "A data set": ("data/shades.py", ("list datasets", "shades")),
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


def told(root: Path, words: str) -> str:
    """What the command prints that is in the folder."""
    command = [sys.executable, "-m", "dcnet", *words.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("words", "expected"), [tells for _, tells in ADDED.values() if tells])
def test_what_a_page_adds_is_found(extended: Path, words: str, expected: str):
    assert expected in told(extended, words)


def test_a_table_of_ones_own_is_found(extended: Path):
    assert "Digits, test error in %" in told(extended, "reproduce widths --status")


def test_an_attack_of_ones_own_is_a_function(extended: Path):
    code = "import dcnet.robustness.attacks as attacks; print(attacks.noise)"
    done = subprocess.run([sys.executable, "-c", code], cwd=extended, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
