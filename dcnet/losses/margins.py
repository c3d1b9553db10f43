"""The contract of margins: functions of the cosine between a feature and the weights of its class, and of the others.

theta_j is the angle between the feature x and the weights W_j of class j; y is the label of x. A new margin is one
class with `@register` in any file. Most margins define `target` and `others`, functions of the cosines alone. A margin
that depends on the batch also defines `target_in` and `others_in`, which take a `Batch`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from dcnet.angle import safe_asin
from dcnet.checks import check_number
from dcnet.parameters import convert_numbers
from dcnet.registry import Registry
from dcnet.spec import format_call, parse_call

# d theta / d cos is infinite at cos = 1 and -1; it is limited where 1 - cos^2 is below this.
DELTA = 1e-6

# The state of a margin over batches: numbers as tensors [].
State = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """What a margin may depend on besides a cosine; the head passes it.

    Attributes:
        own: the cosines [N] with the weights of the labels, without a gradient; zeros where no process has the label.
        norms: the norms [N] of the features.
        kept: bool [N], False for ignored samples.
        state: the state of the margin.
        training: whether the head is in training mode.
    """

    own: Tensor
    norms: Tensor
    kept: Tensor
    state: State
    training: bool = True


@dataclass(frozen=True)
class Margin:
    """A margin: the logits s psi(theta_y) of the label and s eta(theta_j) of all other classes.

    Attributes:
        name: the name in the registry, in specs and in records.
        about: both logits as formulas, for `dcnet list margins`.
        aliases: other names in specs.
        unit_weights: whether the weights W_j are normalized.
        bias: whether the classes have biases.
        binary: whether each class has its own logistic loss instead of a softmax over all classes.
        annealed: whether training needs annealing.
        uses_norms: whether the margin depends on the norms of the features.
        scale: the default s of a head; None for ||x||.
        device: the device function of `target`, see `dcnet.losses.device_margins`; None if there is none, or if the
            margin depends on more than the cosine of the label.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    unit_weights: ClassVar[bool] = True
    bias: ClassVar[bool] = False
    binary: ClassVar[bool] = False
    annealed: ClassVar[bool] = False
    uses_norms: ClassVar[bool] = False
    scale: ClassVar[float | None] = None
    device: ClassVar[Any] = None

    def __post_init__(self) -> None:
        convert_numbers(self)
        for each in fields(self):
            if each.metadata:
                check_number(f"{each.name} of {self.name}", getattr(self, each.name), **each.metadata)

    def __str__(self) -> str:
        """The spec, which `as_margin` parses; default values are left out."""
        return format_call(self, self.name)

    def target(self, cos: Tensor) -> Tensor:
        """psi as a function of cos(theta_y)."""
        return cos

    def others(self, cos: Tensor) -> Tensor:
        """eta as a function of cos(theta_j)."""
        return cos

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        """psi for the cosines [N] of a batch; `target` is then psi of a typical sample."""
        return self.target(cos)

    def others_in(self, cos: Tensor, batch: Batch) -> Tensor:
        """eta for the cosines [N, C] of a batch."""
        return self.others(cos)

    def penalty(self, norms: Tensor) -> Tensor | None:
        """A regularizer [N] of the norms, which is added to the losses."""
        return None

    def first_state(self) -> State:
        """The initial state, as tensors [] on the CPU; a head has a buffer for each of them."""
        return {}

    def next_state(self, batch: Batch) -> State:
        """The state after this batch, computed on the device; the batch itself uses it."""
        return {}

    def of_one_batch(self) -> Margin:
        """The margin whose state depends on the current batch alone."""
        return self

    def centers(self) -> int:
        """The number of centers of a class; the cosine of a class is that of its nearest center."""
        return 1

    def loss_weights(self, scale: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The weights of the losses of the label and of each other class, in a binary margin."""
        return 0.5 / scale, 0.5 / scale

    def first_bias(self, classes: int, scale: float) -> float:
        """The initial offset of all logits, in a binary margin."""
        return 0.0

    def device_numbers(self) -> tuple[float, ...] | None:
        """The numbers of the device function; None if it does not hold for this margin."""
        return ()


def limited(default: float, **limits: float) -> Any:
    """A constant of a margin that must be within limits of `check_number`, such as least=0 and below=2."""
    return field(default=default, metadata=limits)


def _plain(name: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[-_\s]", "", name).lower()


registry: Registry[type[Margin]] = Registry("a margin", discover="dcnet.losses", normalize=_plain)
register = registry.register
# Maps every alias to the registered name.
aliases = registry.aliases


def as_margin(given: Margin | str) -> Margin:
    """The margin of a spec such as `a-softmax`, `arcface(m=0.3)` or `cosface`, or the margin itself.

    Aliases are accepted, and case, hyphens, underscores and spaces are ignored: `CosFace` and `am_softmax` both mean
    `am-softmax`, which is the name that the margin prints.
    """
    if isinstance(given, Margin):
        return given
    margin: Margin = parse_call(str(given), registry)
    return margin


def angle(cos: Tensor) -> Tensor:
    """theta, with a slope that stays finite at 0 and pi."""
    return math.pi / 2 - safe_asin(cos, DELTA)


def nearest_centers(cos: Tensor, centers: int) -> Tensor:
    """Cosines [N, C] with classes, from those [N, C * centers] with their centers: the largest of each class."""
    return cos if centers == 1 else cos.unflatten(1, (-1, centers)).max(2).values


def mean_centers(weight: Tensor, classes: int) -> Tensor:
    """One direction per class [C, D] from the weights of all centers, for pictures: the mean of its directions."""
    centers = len(weight) // classes
    return weight if centers == 1 else F.normalize(weight).unflatten(0, (-1, centers)).mean(1)
