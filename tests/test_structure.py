"""Rules of the codebase: floors of imports, names of modules, and the map of the paper to code and tests."""

import ast
import collections
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dcnet"

# From the bottom up; a module may import from its own floor and from those below.
FLOORS = [
    ["registry", "files", "terminal", "table", "device_functions", "environment", "exit_codes", "interrupts", "lazy"],
    ["checks", "clamp", "cpu_passes", "modes", "tracing", "inlining"],
    ["parameters"],
    ["spec"],
    ["component"],
    ["magnitude", "angle", "weighting"],
    ["operator"],
    ["norms", "eager", "attention_inputs"],
    ["kernels"],
    ["attention", "flex_scores", "functional"],
    ["layers"],
    ["presets", "testing"],
    ["convert", "losses", "network_norms", "optim", "regularizers", "filter_optimizers"],
    ["inference", "chains", "fuse"],
    ["export"],
    ["models"],
    ["data"],
    ["gradient_attack"],
    ["training"],
    ["verification"],
    ["robustness"],
    ["experiments"],
    ["report"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}


# Imports inside functions: optional packages, and packages that few calls need.
IMPORTED_LATE = {
    "data/mnist.py": {"sklearn", "sklearn.model_selection"},
    "kernels/cudnn_graphs.py": {"cudnn"},
    "training/checkpoints.py": {"dcnet.training.shard_storage"},
    "training/state.py": {"dcnet.training.shard_storage", "torch.distributed.tensor"},
}


def modules():
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def path_in_package(path):
    return path.relative_to(PACKAGE).as_posix()


def package_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree):
    """The modules that are imported anywhere in a tree; dcnet's own modules by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "dcnet":
            yield from (f"dcnet.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_imports_go_down_only():
    found = [
        f"{path_in_package(path)} imports {name}, which is on a higher floor"
        for path in modules()
        for name in imported(ast.parse(path.read_text()))
        if name.startswith("dcnet.") and LEVEL[name.split(".")[1]] > LEVEL[package_of(path)]
    ]
    assert found == []


def test_no_two_modules_have_the_same_name():
    names = collections.Counter(path.name for path in modules() if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_inside_functions_are_listed():
    late = collections.defaultdict(set)
    for path in modules():
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for name in (name for function in functions for name in imported(function)):
            if name.split(".")[0] not in sys.stdlib_module_names:
                late[path_in_package(path)].add(name)
    assert late == IMPORTED_LATE
    assert sum(map(len, IMPORTED_LATE.values())) <= 15


def test_contributing_lists_every_module():
    (tree,) = re.findall(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    rows = [line.split(maxsplit=1) for line in tree.splitlines() if line.strip()]
    assert [row for row in rows if len(row) < 2] == []
    listed = [path for path, _ in rows if path.endswith(".py")]
    assert sorted(listed) == sorted(path_in_package(path) for path in modules() if not path.name.startswith("__"))


def map_rows():
    text = (ROOT / "docs" / "paper_map.md").read_text()
    return [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("|") and "`" in row]


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row[0].strip())
def test_paper_map_names_existing_symbols_and_tests(row):
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


def test_paper_map_has_every_equation():
    numbers = {int(number) for row in map_rows() for number in re.findall(r"Eq\. (\d+)", row[0])}
    assert set(range(1, 19)) <= numbers


def text_without_encoding(path):
    """The lines that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mode = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        # Other modules such as PIL and tarfile have an `open` for files that are not text.
        opened = name == "open" and isinstance(node.func, ast.Name) and not any("b" in str(word) for word in mode)
        opened |= name == "open" and any(word in ("w", "r", "a", "x") for word in mode)
        if name in ("read_text", "write_text") or opened:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_text_files_are_opened_as_utf8():
    assert [line for path in modules() for line in text_without_encoding(path)] == []
