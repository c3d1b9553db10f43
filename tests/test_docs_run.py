"""Every page of the docs does what it shows; a new page is found by itself.

Blocks of Python are run as a reader pastes them: each with no names but its own, in an empty folder, unless its first
line says that it continues the code above. A block that cannot be run has a comment right before it,
`<!-- not run: why -->`. Of commands in blocks of bash, and of those with options in a line of text, the options are
looked at.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.docs_pages import ROOT, blocks, commands, languages, pages, pasted

from dcnet.cli.app import UnknownCommandError, parse

# What the blocks of a page need beyond the stand-ins here is given by tests of their own.
ELSEWHERE = {"docs/verification.md": "tests/test_docs_verification.py"}
# What would take too long, or needs what only happens in a training that is not shown.
SMALLER = {
    '"resnet32"': '"cnn9", width=0.05',
    '"cnn9", operator="tanh-cos", num_classes=10)': '"cnn9", operator="tanh-cos", num_classes=10, width=0.1)',
    "steps=1000": "steps=1",
    "dcnet.convert.finish_blend_(model)": "",
}
# Pages may register more.
REGISTRIES = [
    ("dcnet.magnitude", "registry"),
    ("dcnet.angle", "registry"),
    ("dcnet.weighting", "registry"),
    ("dcnet.losses", "registry"),
    ("dcnet.models", "networks"),
    ("dcnet.data", "datasets"),
    ("dcnet.training", "RECIPES"),
    ("dcnet.robustness.task", "registry"),
    ("dcnet.ascent", "norms"),
    ("dcnet.robustness.corruptions", "registry"),
    ("dcnet.experiments", "experiments"),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_code() -> list[Path]:
    return [page for page in pages() if blocks(page, "python") and name_of(page) not in ELSEWHERE]


@contextmanager
def registries_as_they_are() -> Iterator[None]:
    """Leaves every registry as it was."""
    found = [getattr(importlib.import_module(module), name) for module, name in REGISTRIES]
    before = [dict(registry) for registry in found]
    try:
        yield
    finally:
        for registry, entries in zip(found, before, strict=True):
            registry.clear()
            registry.update(entries)


@pytest.mark.parametrize("page", with_code(), ids=name_of)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small networks in place of the paper's."""
    monkeypatch.delenv("DCNET_RUNS", raising=False)
    for place, group in enumerate(pasted(page)):
        folder = tmp_path / str(place)
        folder.mkdir()
        monkeypatch.chdir(folder)
        names: dict[str, object] = {"__name__": "__main__"}
        with registries_as_they_are():
            for block in group:
                exec(block.compiled(smaller(block.code)), names)


def smaller(code: str) -> str:
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


def test_few_blocks_continue_others() -> None:
    """Where it is the point of a page, as for what is registered and then used."""
    continued = {name_of(page): sum(len(group) - 1 for group in pasted(page) if group) for page in pages()}
    allowed = ("docs/extending.md", "docs/training.md", "docs/verification.md")
    assert {page for page, count in continued.items() if count} <= set(allowed)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_what_runs_elsewhere_does(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text()


def test_no_block_is_overlooked() -> None:
    """By the name of its language, such as py."""
    assert set().union(*map(languages, pages())) <= {"bash", "python", "text", ""}


def test_a_block_that_is_not_run_says_why() -> None:
    unrun = [block for page in pages() for block in blocks(page, "python") if block.reason is not None]
    assert all(len(block.reason or "") > 10 for block in unrun)
    assert len(unrun) <= 3


def exit_code(words: list[str]) -> object:
    """What `dcnet` would say to its options, without doing anything; 0 if nothing is wrong with them."""
    try:
        parse(words)
    except SystemExit as ended:
        return ended.code
    except UnknownCommandError:
        return 2
    return 0


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages()], ids=name_of)
def test_commands_have_the_options_that_are_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        assert exit_code(words) == 0, f"dcnet {' '.join(words)}\n{capsys.readouterr()}"


def test_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "A `dcnet train --epochs 3`, `dcnet train ... --x 1` and `dcnet train --runs` in text.\n\n"
        '```bash\nmkdir x && .venv/bin/dcnet train --operators \\\n    "seg(slope=0.2)-cos" > out  # dcnet no\n'
        "torchrun -m dcnet train\ncd dcnet\n```\n"
    )
    train = ["train", "--operators", "seg(slope=0.2)-cos"]
    assert commands(page) == [train, ["train"], ["train", "--epochs", "3"]]


@pytest.mark.parametrize("words", ["train --no-such-option 3", "no-such-command", "predict", "train --epochs many"])
def test_a_wrong_command_is_found(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(words.split()) == 2
    assert exit_code(["train", "--help"]) == 0
