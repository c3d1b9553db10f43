"""The registry of networks, and `create_model`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dcnet.convert import decouple
from dcnet.fuse import fuse
from dcnet.models.blocks import Network
from dcnet.models.settings import Settings
from dcnet.operator import Operator
from dcnet.registry import Registry

Builder = Callable[[Settings], Network]
Handler = TypeVar("Handler", bound=Callable[..., Network])


@dataclass(frozen=True)
class Entry:
    """The function that builds a network, and its defaults where they differ from `Settings`."""

    build: Builder
    defaults: dict[str, Any]

    @property
    def __name__(self) -> str:
        return self.build.__name__


# Functions that build the networks named "prefix:name", from the name and the arguments of `create_model`.
prefixes: Registry[Callable[..., Network]] = Registry("a prefix of networks", discover="dcnet.models")

networks: Registry[Entry] = Registry(
    "a network", discover="dcnet.models", extra=lambda: [f"{prefix}:<name>" for prefix in prefixes]
)


def register(name: str, **defaults: Any) -> Callable[[Builder], Builder]:
    """A decorator that registers a network by name, with its defaults where they differ from `Settings`."""

    def add(build: Builder) -> Builder:
        networks.add(name, Entry(build, defaults), module=build.__module__)
        return build

    return add


def register_prefix(prefix: str) -> Callable[[Handler], Handler]:
    """A decorator that registers a function for all networks named "prefix:name"."""
    return lambda handler: prefixes.add(prefix, handler, module=handler.__module__)


def create_model(
    name: str,
    operator: Operator | str = "tanh-cos",
    num_classes: int = 100,
    norm: str | None = None,
    activation: str | None = None,
    classifier: str | None = None,
    width: float = 1.0,
    in_channels: int = 3,
    image_size: int | None = None,
    norm_eps: float | None = None,
    norm_momentum: float | None = None,
    attention: Operator | str | None = None,
    init_variance: float | None = None,
) -> Network:
    """A new network with any operator in its convolutions; on a machine with a GPU its blocks are fused, see `fuse`.

    None means the default of the network or, if it has none, that of `Settings`.

    Args:
        name: one of `dcnet.models.networks`.
        operator: an Operator, its spec, or "conv" for torch's own layers.
        num_classes: number of classes; 0 for a network that returns its features.
        norm: "batch" or "none", "group" for convolutional networks, and "layer" or "rms" for transformers.
        activation: "relu", "prelu", "gelu" or "none".
        classifier: "linear", or "normalized" for logits ||x|| cos(theta) (Table 5).
        width: multiplies the channels of every layer.
        in_channels: number of channels of the images.
        image_size: side of the images; networks that end with average pooling take any size.
        norm_eps: epsilon of the normalization.
        norm_momentum: momentum of batch normalization, as in torch: the weight of the newest batch. With the authors'
            0.001, evaluation is meaningless for thousands of batches.
        attention: the operator of the scores of attention, see `dcnet.decouple`; None for inner products.
        init_variance: v for initial weights from N(0, v / (k * k * c_in)). Layers keep the variance with v = 2 if ReLU
            follows, and with v = 1 without an activation.
    """
    # A copy: a comprehension over locals() fails in Python 3.12 under a debugger, which adds its variables to them.
    given = dict(locals())
    del given["name"], given["attention"]
    prefix, _, rest = name.partition(":")
    if rest and prefix in prefixes:
        network = prefixes[prefix](rest, **given)
    else:
        entry = networks[name]
        asked = {key: value for key, value in given.items() if value is not None}
        network = entry.build(Settings(**{**entry.defaults, **asked}))
    if attention is not None:
        decouple(network, attention=attention, inplace=True)
    return fuse(network) if _has_gpu() else network


def _has_gpu() -> bool:
    """Whether the network may run on a GPU; without memory for its parameters it never runs."""
    return torch.cuda.is_available() and torch.get_default_device().type != "meta"


def count_parameters(name: str, operator: str, num_classes: int) -> int:
    """The number of parameters of a network, without allocating memory for them."""
    with torch.device("meta"):
        model = create_model(name, operator, num_classes)
    return sum(parameter.numel() for parameter in model.parameters())
