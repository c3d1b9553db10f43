"""The paper's networks, written once for plain and decoupled layers; every file of this folder may register more."""

import importlib
import pkgutil

from dcnet.models.blocks import Network
from dcnet.models.registry import Entry, create_model, networks, register, register_prefix
from dcnet.models.settings import Settings

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["Entry", "Network", "Settings", "create_model", "networks", "register", "register_prefix"]
