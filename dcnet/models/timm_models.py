"""Decoupled networks of the timm package: `create_model("timm:resnet18", ...)`."""

import difflib
import importlib
import importlib.util
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from dcnet.convert import decouple
from dcnet.models.blocks import Network
from dcnet.models.create import register_prefix
from dcnet.models.settings import Settings
from dcnet.modes import evaluating
from dcnet.operator import Operator

MISSING = re.compile(r"operator torchvision::(\w+) does not exist")
MOST_MISSING = 50

# torch removes the operators of a library that is garbage-collected.
_declared: list[torch.library.Library] = []


def import_timm() -> Any:
    """The timm package; raises ImportError if timm or torchvision cannot be imported."""
    try:
        if importlib.util.find_spec("torchvision") is not None:
            _import_torchvision()
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ModuleNotFoundError("networks of timm require the timm package: pip install timm", name="timm") from None
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise ImportError(
            f"timm requires a torchvision for torch {torch.__version__}, but the installed one does not fit: {error}"
        ) from None


def _import_torchvision() -> None:
    """Imports torchvision, and declares each missing operator that the import fails on, up to a limit."""
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


PREFIX = "timm"


@register_prefix(PREFIX)
def timm_network(
    name: str,
    *,
    operator: Operator | str,
    num_classes: int,
    classifier: str | None,
    in_channels: int,
    width: float,
    image_size: int | None,
    **others: Any,
) -> Network:
    """A network with timm's as the body, without its weights, and a linear classifier with a bias.

    All convolutions except 1x1 shortcuts are decoupled; linear layers of the body stay plain. A network with a fixed
    input size, such as a vision transformer, is created for `image_size`; ValueError if it does not support the size.
    For pretrained weights see `dcnet train --weights`, or call `dcnet.decouple` on a network of timm.
    """
    given = {"width": None if width == 1 else width, **others}
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option}={value!r} does not apply to 'timm:{name}', which timm defines: omit it")
    settings = Settings(
        operator,
        num_classes=num_classes,
        classifier=classifier or "linear",
        in_channels=in_channels,
        classifier_bias=True,
    )
    body = _create(name, in_channels, image_size, num_classes=0)
    if image_size is not None:
        _check_size(body, name, in_channels, image_size)
    features = getattr(body, "head_hidden_size", body.num_features)
    return Network(settings, decouple(body, settings.operator, shortcuts=False, inplace=True), features)


def timm_pixels(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels in [0, 1] that the weights of a timm network expect."""
    config = _config(name)
    return tuple(config.mean), tuple(config.std)


def with_weights(
    name: str, tensors: Mapping[str, Tensor] | None, in_channels: int, image_size: int | None
) -> tuple[nn.Module, nn.Linear | None]:
    """timm's plain network with pretrained weights, and its classifier.

    timm adapts the weights where it can: the first filters to other channels, positions to another image size.

    Args:
        name: the name of the network in timm.
        tensors: the weights in timm's naming, for any number of classes; None downloads timm's own.
        in_channels: number of channels of the images.
        image_size: side of the images.
    """
    if tensors is None:
        body = _own_weights(name, in_channels, image_size)
    else:
        overlay = {"state_dict": dict(tensors), "num_classes": _classes(name, tensors), "label_offset": 0}
        options = {"pretrained": True, "pretrained_cfg_overlay": {**overlay, "custom_load": False, "source": ""}}
        try:
            body = _create(name, in_channels, image_size, num_classes=overlay["num_classes"], **options)
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"the weights do not fit 'timm:{name}': {_first_difference(error)}") from None
    classifier = body.get_classifier()
    return body, classifier if isinstance(classifier, nn.Linear) else None


def own_file(name: str) -> Path | None:
    """The cached file with timm's own weights from the Hugging Face hub, if there is one."""
    hub = importlib.import_module("huggingface_hub")
    config = _config(name)
    for file in (config.hf_hub_filename, "model.safetensors", "pytorch_model.bin"):
        found = hub.try_to_load_from_cache(config.hf_hub_id, file) if file and config.hf_hub_id else None
        if isinstance(found, str):
            return Path(found)
    return None


def _own_weights(name: str, in_channels: int, image_size: int | None) -> Any:
    try:
        if own_file(name) is None:
            _check_network()
        return _create(name, in_channels, image_size, pretrained=True)
    except Exception as error:
        # The packages that download weights raise many kinds of errors.
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise ValueError(
            f"timm's weights of {name!r} are not in its cache and cannot be downloaded: {reason}; "
            "give a .safetensors file instead of 'timm'"
        ) from None


def _check_network() -> None:
    """Raises OSError if the name of the hub cannot be resolved; a download would retry for a minute."""
    host = urlsplit(importlib.import_module("huggingface_hub.constants").ENDPOINT).hostname
    if host and not getproxies():
        socket.getaddrinfo(host, 443)


def _classes(name: str, tensors: Mapping[str, Tensor]) -> int:
    """The number of classes of the classifier in the weights; 0 without one."""
    names = _config(name).classifier or ()
    first = names if isinstance(names, str) else next(iter(names), "")
    weight = tensors.get(f"{first}.weight")
    return 0 if weight is None else len(weight)


def _first_difference(error: Exception) -> str:
    """The first difference in torch's message about weights that do not fit."""
    if isinstance(error, KeyError):
        return f"there is no {error.args[0]!r} among them"
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    first, more, _ = (lines[1] if len(lines) > 1 else str(error)).partition('", ')
    return f'{first}", ...' if more else first


def _config(name: str) -> Any:
    """timm's configuration of a network; ValueError with the nearest names for an unknown one."""
    timm = import_timm()
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists all"
        raise ValueError(f"unknown timm network {name!r}: {hint}")
    return timm.models.get_pretrained_cfg(name) or timm.models.get_pretrained_cfg(architecture)


def _create(name: str, in_channels: int, image_size: int | None, **options: Any) -> Any:
    config = _config(name)
    if image_size is not None and getattr(config, "fixed_input_size", False):
        options["img_size"] = image_size
    try:
        return import_timm().create_model(name, in_chans=in_channels, **options)
    except (AssertionError, TypeError, ZeroDivisionError) as error:
        raise _size_error(name, image_size, error) from None


@torch.no_grad()
def _check_size(body: nn.Module, name: str, in_channels: int, image_size: int) -> None:
    """Runs an image through the plain network; ValueError if the size does not fit."""
    try:
        with evaluating(body):
            body(torch.zeros(1, in_channels, image_size, image_size))
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise _size_error(name, image_size, error) from None


def _size_error(name: str, image_size: int | None, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ValueError(
        f"'timm:{name}' does not support images of {image_size} x {image_size} pixels: {reason}; change image_size"
    )
