"""Packages whose names load on first use (PEP 562), so that `import dcnet` does not import torch.

The names of a package, and the modules they come from, are the imports of the stub `__init__.pyi` beside its
`__init__.py`, which type checkers read as well; `import x as x` declares a name that is not in `__all__`. Every module
of a package is also available as its attribute.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package in which a name of the stub takes precedence over a module of the same name, such as `plan`."""

    def __setattr__(self, name: str, value: Any) -> None:
        imported = value is sys.modules.get(f"{self.__name__}.{name}")
        if not imported or self.__dict__["_sources"].get(name, self.__name__) == self.__name__:
            super().__setattr__(name, value)


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package, from the stub beside its file."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [node for node in stub if isinstance(node, ast.ImportFrom)]
    sources = {alias.name: str(node.module) for node in imports for alias in node.names}
    public = next(ast.literal_eval(node.value) for node in stub if isinstance(node, ast.Assign))
    module = sys.modules[package]
    module.__dict__["_sources"] = sources
    module.__class__ = LazyPackage

    def load(name: str) -> Any:
        source = sources.get(name, package)
        if source == package and (name.startswith("_") or find_spec(f"{package}.{name}") is None):
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        found = import_module(f"{package}.{name}") if source == package else getattr(import_module(source), name)
        module.__dict__[name] = found
        return found

    return load, lambda: sorted({*sources, *module.__dict__} - {"_sources"}), public
