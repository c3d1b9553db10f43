"""The networks of the timm package, decoupled: `create_model("timm:resnet18", ...)`."""

import difflib
import importlib
from typing import Any

import torch
from torch import nn

from dcnet.convert import decouple
from dcnet.models.blocks import Network
from dcnet.models.registry import register_prefix
from dcnet.models.settings import Settings
from dcnet.operator import Operator


@register_prefix("timm")
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
    """timm's network as the body, without its weights; its classifier is one of ours, with a bias.

    All convolutions are decoupled but the 1x1 ones of shortcuts; linear layers of the body stay plain. `image_size` is
    not needed. For pretrained weights call `dcnet.decouple` on a network made by timm itself.
    """
    given = {"width": None if width == 1 else width, **others}
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option}={value!r} does not apply to 'timm:{name}', whose structure is timm's: omit it")
    settings = Settings(
        operator,
        num_classes=num_classes,
        classifier=classifier or "linear",
        in_channels=in_channels,
        classifier_bias=True,
    )
    body = _timm_body(name, in_channels)
    features = getattr(body, "head_hidden_size", body.num_features)
    return Network(settings, decouple(body, settings.operator, shortcuts=False, inplace=True), features)


def import_timm() -> Any:
    """The timm package, or one sentence on what it needs."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ModuleNotFoundError("networks of timm need the timm package: pip install timm", name="timm") from None
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise ImportError(
            f"timm needs a torchvision that was built for torch {torch.__version__}, and the one that is installed "
            f"was not: {error}"
        ) from None


def _timm_body(name: str, in_channels: int) -> Any:
    timm = import_timm()
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() gives them all"
        raise ValueError(f"unknown timm network {name!r}: {hint}")
    body: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, in_chans=in_channels)
    return body
