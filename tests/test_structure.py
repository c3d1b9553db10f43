"""The codebase keeps its own rules: imports go down only, and the map of the paper leads somewhere."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dcnet"

# From the bottom up; a module may import from its own floor and from those below.
FLOORS = [
    ["arrays", "files", "output", "escapes", "device", "environment", "interruption", "ending", "opaque", "limits"],
    ["learnable"],
    ["radius"],
    ["part"],
    ["magnitude", "angle", "weighting", "spec"],
    ["operator"],
    ["norms", "meeting", "equation"],
    ["kernels"],
    ["functional"],
    ["layers"],
    ["presets", "testing"],
    ["convert", "losses", "norm_tracking", "optim", "regularizers"],
    ["folded"],
    ["folding"],
    ["export"],
    ["models"],
    ["data"],
    ["verification"],
    ["robustness"],
    ["training"],
    ["experiments"],
    ["report"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}


def modules():
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "dcnet":
            names = [f"dcnet.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        yield from (name.split(".")[1] for name in names if name.startswith("dcnet."))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    for imported in imported_rooms(path):
        assert LEVEL[imported] <= LEVEL[room(path)], f"{room(path)} imports {imported}, which lies above it"


def map_rows():
    text = (ROOT / "docs" / "paper_map.md").read_text()
    return [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("|") and "`" in row]


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row[0].strip())
def test_the_map_of_the_paper_leads_to_symbols_and_tests(row):
    _, _, symbols, tests = row
    for symbol in re.findall(r"`([\w.]+)`", symbols):
        parts = symbol.split(".")
        found = None
        for split in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:split]))
            except ModuleNotFoundError:
                continue
            for name in parts[split:]:
                found = getattr(found, name)
            break
        assert found is not None, symbol
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
        assert re.search(rf"^(def|class) {test}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, test)
    assert "`" in tests


def test_every_equation_of_the_paper_is_on_the_map():
    numbers = {int(number) for row in map_rows() for number in re.findall(r"Eq\. (\d+)", row[0])}
    assert set(range(1, 19)) <= numbers


def text_without_encoding(path):
    """The lines that read or write text in whatever the locale says."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mode = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        # What another module opens, as PIL and tarfile do, is no text.
        opened = name == "open" and isinstance(node.func, ast.Name) and not any("b" in str(word) for word in mode)
        opened |= name == "open" and any(word in ("w", "r", "a", "x") for word in mode)
        if name in ("read_text", "write_text") or opened:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_text_is_utf8_whatever_the_locale():
    assert [line for path in modules() for line in text_without_encoding(path)] == []
