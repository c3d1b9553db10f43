"""timm imported beside any torch, also one that torchvision was not built for.

timm imports torchvision for its transforms. The torchvision of the public index is built for a torch with CUDA. Beside
a CPU torch its compiled library does not load, and its Python code fails where it refers to operators of that library:
"operator torchvision::nms does not exist". No network of timm uses them, so they are declared here, and the import
works. A declared operator cannot be called; torchvision raises an error of its own.
"""

import importlib
import importlib.util
import re
import sys
from typing import Any

import torch

MISSING = re.compile(r"operator torchvision::(\w+) does not exist")
MOST_MISSING = 50

# torch removes the operators of a library that is garbage-collected.
_declared: list[torch.library.Library] = []


def import_timm() -> Any:
    """The timm package; ImportError of one sentence where it or its torchvision cannot be imported."""
    try:
        if importlib.util.find_spec("torchvision") is not None:
            _import_torchvision()
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ModuleNotFoundError("networks of timm need the timm package: pip install timm", name="timm") from None
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise ImportError(
            f"timm needs a torchvision that works beside torch {torch.__version__}, and the one that is installed "
            f"does not: {error}"
        ) from None


def _import_torchvision() -> None:
    """Import torchvision, declaring each operator that it misses; the limit only ends what would never end."""
    for _ in range(MOST_MISSING):
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = MISSING.search(str(error))
            if missing is None:
                raise
            _declare(missing[1])
        else:
            return


def _declare(operator: str) -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
