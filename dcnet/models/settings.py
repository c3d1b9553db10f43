"""The settings of a network, and the available norms, activations and classifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from dcnet.checks import check_choice, check_number, check_whole
from dcnet.layers import linear
from dcnet.operator import Operator, as_operator, is_plain

# Epsilon of each normalization: the authors' value for batch normalization, and the usual ones for the others.
NORM_EPS = {"batch": 1e-3, "group": 1e-5, "layer": 1e-6, "rms": 1e-6}
# The largest number of groups of a group normalization, and the smallest number of channels per group.
MOST_GROUPS, FEWEST_CHANNELS = 32, 4
# The authors' values: the initial slope of PReLU, and the standard deviation of the filters in the residual units of
# their ImageNet networks.
PRELU_SLOPE = 0.0
SMALL_DEVIATION = 0.01

# torch's value. With the authors' 0.001 (a decay of 0.999) evaluation is meaningless for thousands of batches: the
# running variance starts at 1, and this start still has a weight of a thousandth after 7,000 batches.
NORM_MOMENTUM = 0.1

Initializer = Callable[[Tensor], object]


def he_normal_(weight: Tensor) -> Tensor:
    """Fills the filters from N(0, 2 / (k * k * c_in))."""
    return nn.init.normal_(weight, std=math.sqrt(2 / weight[0].numel()))


def scaled_normal(variance: float) -> Initializer:
    """Returns a function that fills the filters from N(0, variance / (k * k * c_in))."""
    return lambda weight: nn.init.normal_(weight, std=math.sqrt(variance / weight[0].numel()))


def small_normal_(weight: Tensor) -> Tensor:
    """Fills the filters from N(0, 0.01^2)."""
    return nn.init.normal_(weight, std=SMALL_DEVIATION)


def group_count(channels: int) -> int:
    """The number of groups of a group normalization: a power of 2 that divides the channels."""
    groups = math.gcd(MOST_GROUPS, channels)
    while groups > 1 and channels < FEWEST_CHANNELS * groups:
        groups //= 2
    return groups


NORMS = ("batch", "group", "layer", "rms", "none")
# Normalizations of each token over its channels, for transformers.
TOKEN_NORMS = ("layer", "rms")
CLASSIFIERS = ("linear", "normalized")
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda channels: nn.ReLU(),
    "prelu": lambda channels: nn.PReLU(channels, init=PRELU_SLOPE),
    "gelu": lambda channels: nn.GELU(),
    "none": lambda channels: nn.Identity(),
}


@dataclass(frozen=True)
class Settings:
    """Everything about a network except its structure.

    `init` initializes the weights of all layers except the two convolutions of a residual unit, for which there is
    `unit_init`; `init_variance` replaces both, see `scaled_normal`. With norm_eps=None, the normalization has its own
    epsilon, see NORM_EPS. `classifier_bias` says whether a linear classifier has a bias.
    """

    operator: Operator | str = "tanh-cos"
    num_classes: int = 100
    norm: str = "batch"
    activation: str = "relu"
    classifier: str = "linear"
    width: float = 1.0
    in_channels: int = 3
    image_size: int = 32
    norm_eps: float | None = None
    norm_momentum: float = NORM_MOMENTUM
    init: Initializer = he_normal_
    unit_init: Initializer = he_normal_
    classifier_bias: bool = False
    init_variance: float | None = None

    def __post_init__(self) -> None:
        if not is_plain(self.operator):
            object.__setattr__(self, "operator", as_operator(self.operator))
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("classifier", self.classifier, CLASSIFIERS)
        check_whole("num_classes", self.num_classes, least=0)
        check_whole("in_channels", self.in_channels, least=1)
        check_whole("image_size", self.image_size, least=1)
        check_number("width", self.width, above=0)
        if self.norm_eps is not None:
            check_number("norm_eps", self.norm_eps, above=0)
        check_number("norm_momentum", self.norm_momentum, above=0, most=1)
        if self.init_variance is not None:
            check_number("init_variance", self.init_variance, above=0)
            for name in ("init", "unit_init"):
                object.__setattr__(self, name, scaled_normal(self.init_variance))

    def channels(self, count: int) -> int:
        """The number of channels for a layer with `count` channels at width 1."""
        return max(1, round(count * self.width))

    def make_norm(self, channels: int, spatial: bool = True) -> nn.Module:
        """The normalization of a convolution, or of a linear layer if not `spatial`."""
        if self.norm in TOKEN_NORMS:
            raise ValueError(
                f"norm={self.norm!r} needs a transformer, such as vit-tiny: use norm='batch', 'group' or 'none'"
            )
        if self.norm == "group":
            return nn.GroupNorm(group_count(channels), channels, eps=self._norm_eps())
        if self.norm == "none":
            return nn.Identity()
        kind = nn.BatchNorm2d if spatial else nn.BatchNorm1d
        return kind(channels, eps=self._norm_eps(), momentum=self.norm_momentum)

    def make_token_norm(self, channels: int) -> nn.Module:
        """The normalization of tokens [N, T, channels]; for "batch" that of [N, channels, T]."""
        if self.norm == "group":
            raise ValueError("norm='group' needs a convolutional network: use norm='layer', 'rms', 'batch' or 'none'")
        if self.norm not in TOKEN_NORMS:
            return self.make_norm(channels, spatial=False)
        kind = nn.LayerNorm if self.norm == "layer" else nn.RMSNorm
        return kind(channels, eps=self._norm_eps())

    def _norm_eps(self) -> float:
        return NORM_EPS[self.norm] if self.norm_eps is None else self.norm_eps

    def make_activation(self, channels: int) -> nn.Module:
        return ACTIVATIONS[self.activation](channels)

    def make_classifier(self, features: int) -> nn.Module:
        """The last layer; an nn.Identity if num_classes is 0."""
        if self.num_classes == 0:
            return nn.Identity()
        if self.classifier == "normalized":
            # The weight-normalized softmax has logits ||x|| cos(theta), which is this operator; it has no bias.
            classifier = linear(features, self.num_classes, bias=False, operator="linear-cos")
        else:
            classifier = nn.Linear(features, self.num_classes, bias=self.classifier_bias)
        self.init(classifier.weight)
        if classifier.bias is not None:
            nn.init.zeros_(classifier.bias)
        return classifier
