"""Packages load their names on first use."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dcnet

PACKAGE = Path(dcnet.__file__).parent
STUBS = sorted(PACKAGE.rglob("__init__.pyi"))


def name_of(stub):
    return ".".join(stub.parent.relative_to(PACKAGE.parent).parts)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("stub", STUBS, ids=name_of)
def test_every_name_of_a_stub_can_be_imported(stub):
    package = importlib.import_module(name_of(stub))
    declared = next(node.value for node in ast.parse(stub.read_text()).body if isinstance(node, ast.Assign))
    assert ast.literal_eval(declared) == package.__all__
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_importing_the_packages_does_not_import_torch():
    names = ", ".join(name_of(stub) for stub in STUBS)
    assert run(f"import sys, {names}; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'dcnet' has no attribute 'decuple'"):
        _ = dcnet.decuple
    with pytest.raises(ImportError, match="cannot import name 'decuple'"):
        from dcnet import decuple  # noqa: F401


def test_function_takes_precedence_over_a_module_of_the_same_name(monkeypatch):
    """Importing a module sets it as an attribute of its package."""
    module = types.ModuleType("dcnet.verification.roc")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dcnet.verification.roc = module
    assert callable(dcnet.verification.roc)
