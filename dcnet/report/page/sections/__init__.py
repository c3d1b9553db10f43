"""One file for each section; a file that is put here is found."""

import importlib
import pkgutil

for _found in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    importlib.import_module(f"{__name__}.{_found.name}")
