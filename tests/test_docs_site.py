"""The docs site loads nothing from other servers, contains every public name, and has valid links."""

import importlib
import importlib.util
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dcnet.robustness import attacks

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

# Each module, and the page with its names.
PUBLIC = {
    "dcnet": "dcnet",
    "dcnet.convert": "functions",
    "dcnet.functional": "functions",
    "dcnet.losses": "losses",
    "dcnet.models": "models",
    "dcnet.data": "data",
    "dcnet.training": "training",
    "dcnet.verification": "verification",
    "dcnet.robustness": "robustness",
    "dcnet.experiments": "experiments",
}
# Addresses that a browser loads by itself, unlike links that a reader follows.
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\s\">]+)|<link\b[^>]*\bhref=\"?([^\s\">]+)")
IN_STYLES = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")
ELSEWHERE = re.compile(r"(?:\w+:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`, but without --strict."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def _environment() -> dict[str, str]:
    return {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("repository_hook", ROOT / "docs" / "hooks" / "repository.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_loaded_from_other_servers(site: Path) -> None:
    texts = [(file, FETCHED, file.read_text()) for file in site.rglob("*.html")]
    texts += [(file, IN_STYLES, file.read_text()) for file in site.rglob("*.css")]
    found = [(file, address) for file, kind, text in texts for pair in kind.findall(text) for address in pair]
    assert any(address.endswith(".js") for _, address in found)
    assert [(file.name, address) for file, address in found if ELSEWHERE.match(address)] == []


@pytest.mark.parametrize(("module", "page"), PUBLIC.items())
def test_every_public_name_is_on_its_page(site: Path, module: str, page: str) -> None:
    text = (site / "api" / f"{page}.html").read_text()
    named = set(re.findall(r"<code>(\w+)</code>", text))
    found = set(re.findall(r'id="([\w.]+)"', text))
    package = importlib.import_module(module)
    for name in (name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)):
        assert name in named or found & {f"{module}.{name}", f"{module}.{name}.{name}"}, f"{module}.{name}"


def test_rows_of_argument_tables_have_one_name(site: Path) -> None:
    """If two arguments shared a description, the second name would be shown as the type of the first."""
    row = re.compile(r"<td><code>(?:<span[^>]*>)?([^<]*)(?:</span>)?</code></td>")
    names = [(file.stem, name) for file in (site / "api").glob("*.html") for name in row.findall(file.read_text())]
    assert ("training", "norm_momentum") in names
    assert [pair for pair in names if not re.fullmatch(r"\**\w+", pair[1])] == []


@pytest.mark.parametrize("name", attacks.registry)
def test_attack_functions_are_shown_with_their_parameters(site: Path, name: str) -> None:
    text = (site / "api" / "robustness.html").read_text()
    entry = text.partition(f'id="dcnet.robustness.attacks.{name}"')[2].partition('<div class="doc doc-object')[0]
    words = re.sub(r"<[^>]+>", "", entry).split()
    for parameter in inspect.signature(getattr(attacks, name)).parameters:
        assert f"{parameter}:" in words, "in the signature"
        assert parameter in words, "in the table of parameters"


def test_files_outside_docs_are_pages(site: Path) -> None:
    assert "Add a magnitude in five minutes" in (site / "contributing.html").read_text()
    assert 'href="contributing.html"' in (site / "operators.html").read_text()
    assert 'src="images/operators.png"' in (site / "overview.html").read_text()


def test_links_are_rewritten_for_the_site(hook: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    text = (
        "[a](../README.md#use-it) [`b`](../dcnet/cli) [c](training.md) [d](https://x.y/z)\n```\n[e](../LICENSE)\n```\n"
    )
    expected = "[a](overview.md#use-it) `b` [c](training.md) [d](https://x.y/z)\n```\n[e](../LICENSE)\n```\n"
    assert hook.with_links(text, "losses.md") == expected
    assert hook.with_links("![f](docs/images/x.png) [g](CONTRIBUTING.md)", "overview.md") == (
        "![f](images/x.png) [g](contributing.md)"
    )
    assert hook.with_links("[h](../extending.md) [i](index.md)", "api/parts.md") == "[h](../extending.md) [i](index.md)"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        hook.with_links("[j](../no_such_file.py)", "losses.md")
    assert "docs/losses.md has a link to ../no_such_file.py" in caplog.text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_search_works_from_the_disk(site: Path, tmp_path: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    page = f"{(site / 'index.html').as_uri()}?q=projection"
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert re.search(r"\d+ matching documents", done.stdout)
    assert "WeightProjection" in done.stdout
