"""The networks whose training steps are timed, of dcnet and of timm."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dcnet.convert import decouple
from dcnet.fuse import fuse, unfuse
from dcnet.models import create_model
from dcnet.models.timm_models import PREFIX, timm_pixels
from dcnet.operator import PLAIN, is_plain

CLASSES = 100
# The set "timm": networks of five families, for images of 224 x 224 pixels.
TIMM = (
    "timm:resnet50",
    "timm:convnext_tiny",
    "timm:mobilenetv3_large_100",
    "timm:efficientnet_b0",
    "timm:vit_small_patch16_224",
)


def is_timm(name: str) -> bool:
    """Whether a network is one of timm."""
    return name.partition(":")[0] == PREFIX


def expand_networks(names: Iterable[str]) -> list[str]:
    """The names without duplicates; "timm" stands for five networks. ValueError if timm lacks one, or is missing."""
    found = list(dict.fromkeys(one for name in names for one in (TIMM if name == PREFIX else (name,))))
    try:
        for name in filter(is_timm, found):
            timm_pixels(name.partition(":")[2])
    except ImportError as error:
        raise ValueError(str(error)) from None
    return found


def build_network(name: str, operator: str, width: float, size: int, fused: bool) -> nn.Module:
    """The network with random weights; a decoupled one has fused blocks on a machine with a GPU, unless turned off.

    In a network of timm, all convolutions and linear layers except the classifier are decoupled, and nothing is
    dropped at random.
    """
    if not is_timm(name):
        model = create_model(name, operator, CLASSES, width=width, image_size=size)
        return model if fused else unfuse(model)
    network = unfuse(create_model(name, PLAIN, CLASSES, width=width, image_size=size))
    drop_nothing_(network)
    if not is_plain(operator):
        decouple(network.body, operator, linear=True, inplace=True)
    return fuse(network) if fused and torch.cuda.is_available() else network


def drop_nothing_(model: nn.Module) -> None:
    """Turns off dropout and stochastic depth, which would make two passes differ."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "drop_rate", "drop_path_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
