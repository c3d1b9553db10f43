"""timm imported beside a CPU-only torch, for which torchvision's registry wheel was not built."""

import importlib
import importlib.util
import sys

import pytest
import torch

# What torchvision's Python code registers upon import, and what its compiled library, which does not load, defines.
MISSING = ("nms", "qnms")

# torch forgets what a library has defined when the library is collected.
_libraries = []


def import_timm():
    """timm; where it is not installed the tests of the calling module are skipped."""
    for package in ("timm", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        _define_missing()
    return importlib.import_module("timm")


def _define_missing():
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in MISSING:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
