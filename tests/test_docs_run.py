"""The code and the commands of all docs pages work; new pages are found automatically.

Each Python block runs in an empty namespace and an empty folder, unless its first line says that it continues earlier
code. A block that cannot run has the comment `<!-- not run: why -->` before it. The options of `dcnet` commands are
parsed, in bash blocks and in text.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.docs_pages import ROOT, blocks, commands, languages, pages, pasted

from dcnet.cli.app import WrongWordsError, parse

# Pages whose code needs files, and the tests that run it.
ELSEWHERE = {"docs/verification.md": "tests/test_docs_verification.py"}
# Replacements for code that takes too long, or that needs a training that the page does not show.
SMALLER = {
    '"resnet32"': '"cnn9", width=0.05',
    '"cnn9", operator="tanh-cos", num_classes=10)': '"cnn9", operator="tanh-cos", num_classes=10, width=0.1)',
}
# Registries that pages may add to.
REGISTRIES = [
    ("dcnet.magnitude", "registry"),
    ("dcnet.angle", "registry"),
    ("dcnet.weighting", "registry"),
    ("dcnet.losses", "registry"),
    ("dcnet.models", "networks"),
    ("dcnet.data", "datasets"),
    ("dcnet.training", "RECIPES"),
    ("dcnet.robustness.task", "registry"),
    ("dcnet.gradient_attack", "norms"),
    ("dcnet.robustness.corruptions", "registry"),
    ("dcnet.experiments", "experiments"),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with_code() -> list[Path]:
    return [page for page in pages() if blocks(page, "python") and name_of(page) not in ELSEWHERE]


@contextmanager
def restore_registries() -> Iterator[None]:
    """Restores every registry at the end."""
    found = [getattr(importlib.import_module(module), name) for module, name in REGISTRIES]
    # A plain dict has no aliases.
    before = [(dict(registry), dict(getattr(registry, "aliases", {}))) for registry in found]
    try:
        yield
    finally:
        for registry, (entries, aliases) in zip(found, before, strict=True):
            registry.clear()
            registry.update(entries)
            getattr(registry, "aliases", {}).update(aliases)


@pytest.mark.parametrize("page", pages_with_code(), ids=name_of)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks replace those of the paper."""
    monkeypatch.delenv("DCNET_RUNS", raising=False)
    for place, group in enumerate(pasted(page)):
        folder = tmp_path / str(place)
        folder.mkdir()
        monkeypatch.chdir(folder)
        names: dict[str, object] = {"__name__": "__main__"}
        with restore_registries():
            for block in group:
                exec(block.compiled(smaller(block.code)), names)


def smaller(code: str) -> str:
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


def test_few_blocks_continue_others() -> None:
    """Only on pages where blocks build on each other, such as registering an entry and then using it."""
    continued = {name_of(page): sum(len(group) - 1 for group in pasted(page) if group) for page in pages()}
    allowed = ("docs/extending.md", "docs/training.md", "docs/verification.md")
    assert {page for page, count in continued.items() if count} <= set(allowed)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_pages_run_elsewhere_are_named_in_their_test(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text()


def test_blocks_have_known_languages() -> None:
    """The tests would not find a block of another language, such as py."""
    assert set().union(*map(languages, pages())) <= {"bash", "python", "text", ""}


def test_blocks_that_are_not_run_give_a_reason() -> None:
    unrun = [block for page in pages() for block in blocks(page, "python") if block.reason is not None]
    assert all(len(block.reason or "") > 10 for block in unrun)
    assert len(unrun) <= 3


def exit_code(words: list[str]) -> object:
    """The exit code of parsing a command: 0 if its options are valid. The command does not run."""
    try:
        parse(words)
    except SystemExit as ended:
        return ended.code
    except WrongWordsError:
        return 2
    return 0


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages()], ids=name_of)
def test_commands_on_pages_are_valid(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_invalid_commands_are_rejected(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(words.split()) == 2
    assert exit_code(["train", "--help"]) == 0
