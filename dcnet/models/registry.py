"""Networks by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dcnet.models.blocks import Network
from dcnet.models.settings import Settings
from dcnet.operator import Operator
from dcnet.spec import unknown

Builder = Callable[[Settings], Network]
Handler = TypeVar("Handler", bound=Callable[..., Network])


@dataclass(frozen=True)
class Entry:
    """A network's builder, and the settings that are its own where none are asked for."""

    build: Builder
    defaults: dict[str, Any]


networks: dict[str, Entry] = {}

# Who makes the networks named "prefix:name", from the name and the arguments of `create_model` as they were given.
prefixes: dict[str, Callable[..., Network]] = {}


def register(name: str, **defaults: Any) -> Callable[[Builder], Builder]:
    """A decorator that enters a network under its name, with its own defaults where they differ from `Settings`."""

    def enter(build: Builder) -> Builder:
        if name in networks:
            raise ValueError(f"{name!r} is taken: {networks[name].build.__name__} is a network of that name")
        networks[name] = Entry(build, defaults)
        return build

    return enter


def register_prefix(prefix: str) -> Callable[[Handler], Handler]:
    """A decorator that hands every network named "prefix:name" to a function of that name and all other arguments."""

    def enter(handler: Handler) -> Handler:
        if prefix in prefixes:
            raise ValueError(f"{prefix!r} is taken: {prefixes[prefix].__name__} makes networks of that prefix")
        prefixes[prefix] = handler
        return handler

    return enter


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
) -> Network:
    """A new network of the paper's, with any operator in place of its convolutions.

    None stands for the network's own choice; where it has none, for the value that `Settings` gives.

    Args:
        name: one of `dcnet.models.networks`.
        operator: an Operator, its spec, or "conv" for torch's own layers.
        num_classes: 0 for a network that ends with its features.
        norm: "batch" or "none".
        activation: "relu", "prelu" or "none".
        classifier: "linear", or "normalized" for logits ||x|| cos(theta) (Table 5).
        width: multiplies the channels of every layer.
        in_channels: of the images.
        image_size: side of the images; the networks that end with average pooling take any.
        norm_eps: of batch normalisation.
        norm_momentum: of batch normalisation, in torch's sense: the weight of the newest batch. The authors' is 0.001,
            with which it takes thousands of batches until evaluation can be trusted.
    """
    given = {
        "operator": operator,
        "num_classes": num_classes,
        "norm": norm,
        "activation": activation,
        "classifier": classifier,
        "width": width,
        "in_channels": in_channels,
        "image_size": image_size,
        "norm_eps": norm_eps,
        "norm_momentum": norm_momentum,
    }
    prefix, _, rest = name.partition(":")
    if rest and prefix in prefixes:
        return prefixes[prefix](rest, **given)
    if name not in networks:
        raise unknown("network", name, [*networks, *(f"{known}:<name>" for known in prefixes)])
    entry = networks[name]
    asked = {key: value for key, value in given.items() if value is not None}
    return entry.build(Settings(**{**entry.defaults, **asked}))
