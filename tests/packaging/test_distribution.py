"""The sdist contains the files that README and CONTRIBUTING name, and its metadata are correct."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md")
# Folders that the commands on these pages create.
CREATED = {".venv", "runs", "site"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The paths of all files and folders of the sdist, relative to its root."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        paths = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    return {*paths, *(parent for path in paths for parent in path.parents)}


def named_paths(text):
    """The targets of links, and the words in code that are files or folders of the repository."""
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    words = {word.strip("./") for block in code for word in re.findall(r"[\w./-]+", block)}
    existing = {word for word in words if word and Path(word).parts[0] not in CREATED and (ROOT / word).exists()}
    makefile = {"Makefile"} if re.search(r"\bmake [a-z]+", text) else set()
    return {Path(link) for link in links if "://" not in link} | {Path(word) for word in existing | makefile}


@pytest.mark.parametrize("page", PAGES)
def test_sdist_contains_the_files_that_pages_name(page, files):
    named = named_paths((ROOT / page).read_text(encoding="utf-8"))
    assert sorted(map(str, named - files)) == []
    assert Path("Makefile") in named


def test_named_paths_include_words_in_code():
    named = named_paths((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {Path(name) for name in ("constraints.txt", "examples", "results", "docs/operators.md")} <= named


def test_sdist_contains_license_and_files_of_the_makefile(files):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    scripts = re.findall(r"tests/[\w/]+\.py", text)
    assert {Path(name) for name in [*scripts, "LICENSE", "constraints.txt", "pyproject.toml"]} <= files
    assert not {path for path in files if path.parts and path.parts[0] in CREATED}


def test_every_supported_python_has_a_classifier():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert project["requires-python"] == f">={named[0]}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named
