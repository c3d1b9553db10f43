"""Margins: functions of the cosine between a feature and the weights of its class, and of the other classes.

theta_j is the angle between the feature x and the weights W_j of class j; y is the label of x. A new margin is one
class with `@register`, here or in another file. Most margins define `target` and `others`, functions of the cosines
alone. A margin that depends on the batch also defines `target_in` and `others_in`, which take a `Batch`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.angle import safe_asin
from dcnet.checks import check_flag, check_number, check_whole
from dcnet.clamp import at_most, between
from dcnet.losses import device_margins
from dcnet.parameters import convert_numbers
from dcnet.registry import Registry
from dcnet.spec import format_call, parse_call

# d theta / d cos is infinite at cos = 1 and -1; it is limited where 1 - cos^2 is below this.
DELTA = 1e-6
# The largest m, since psi has m pieces that are computed one by one.
MOST_PIECES = 1000


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


def monotone_cosine(cos: Tensor, m: float) -> Tensor:
    """psi = (-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m]: cos(m theta) made to decrease over all of [0, pi]."""
    cos = between(cos, -1.0, 1.0)
    k = torch.zeros_like(cos)
    for bound in piece_bounds(m):
        k = k + (cos < bound).to(cos.dtype)
    sign = 1 - 2 * torch.remainder(k, 2)
    wave = CHEBYSHEV[m](cos) if m in CHEBYSHEV else torch.cos(m * angle(cos))
    return sign * wave - 2 * k


def piece_bounds(m: float) -> list[float]:
    """The cosines at which a piece of `monotone_cosine` ends and the next one starts."""
    return [math.cos(k * math.pi / m) for k in range(1, math.ceil(m))]


# cos(m theta) as a polynomial of c = cos(theta).
CHEBYSHEV: dict[float, Callable[[Tensor], Tensor]] = {
    1: lambda c: c,
    2: lambda c: 2 * c * c - 1,
    3: lambda c: (4 * c * c - 3) * c,
    4: lambda c: 8 * c * c * (c * c - 1) + 1,
}


@register
@dataclass(frozen=True)
class Softmax(Margin):
    """W_j x + b_j, without a margin."""

    name: ClassVar[str] = "softmax"
    about: ClassVar[str] = "W_j x + b_j"
    unit_weights: ClassVar[bool] = False
    bias: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class MSoftmax(Margin):
    """||x|| cos(theta_j): with weights of norm 1, the angle alone decides."""

    name: ClassVar[str] = "m-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("modified-softmax",)
    about: ClassVar[str] = "||x|| cos(theta_j)"
    device: ClassVar[Any] = staticmethod(device_margins.plain)


@register
@dataclass(frozen=True)
class ASoftmax(Margin):
    """||x|| psi(theta_y), psi = (-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m] (SphereFace).

    m = 1, 2, 3, 4 use Chebyshev polynomials of the cosine; any other real m uses the angle.
    """

    name: ClassVar[str] = "a-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("sphereface", "angular-softmax")
    about: ClassVar[str] = "||x|| ((-1)^k cos(m theta_y) - 2k), ||x|| cos(theta_j)"
    annealed: ClassVar[bool] = True
    device: ClassVar[Any] = staticmethod(device_margins.monotone_cosine)
    m: float = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=1, most=MOST_PIECES)

    def target(self, cos: Tensor) -> Tensor:
        return monotone_cosine(cos, self.m)

    def device_numbers(self) -> tuple[float, ...]:
        return (self.m, int(self.m), *piece_bounds(self.m)) if self.m in CHEBYSHEV else (self.m, 0)


@register
@dataclass(frozen=True)
class LSoftmax(ASoftmax):
    """||W_y|| ||x|| psi(theta_y): large-margin softmax; weights keep their norms."""

    name: ClassVar[str] = "l-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("large-margin-softmax", "large-margin")
    about: ClassVar[str] = "||W_y|| ||x|| ((-1)^k cos(m theta_y) - 2k), W_j x"
    unit_weights: ClassVar[bool] = False
    m: float = 2


@register
@dataclass(frozen=True)
class AMSoftmax(Margin):
    """s (cos(theta_y) - m): additive-margin softmax, or CosFace."""

    name: ClassVar[str] = "am-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("cosface", "additive-margin-softmax", "lmcl")
    about: ClassVar[str] = "s (cos(theta_y) - m), s cos(theta_j)"
    scale: ClassVar[float | None] = 30.0
    device: ClassVar[Any] = staticmethod(device_margins.subtracted)
    m: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=2)

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.m

    def device_numbers(self) -> tuple[float, ...]:
        return (self.m,)


@register
@dataclass(frozen=True)
class ArcFace(Margin):
    """s cos(theta_y + m), and s (cos(theta_y) - m sin(m)) where theta_y + m exceeds pi, so that it keeps decreasing."""

    name: ClassVar[str] = "arcface"
    aliases: ClassVar[tuple[str, ...]] = ("aam-softmax", "additive-angular-margin-softmax")
    about: ClassVar[str] = "s cos(theta_y + m), s cos(theta_j)"
    scale: ClassVar[float | None] = 64.0
    device: ClassVar[Any] = staticmethod(device_margins.added_angle)
    m: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=math.pi / 2)

    def target(self, cos: Tensor) -> Tensor:
        beyond = cos - self.m * math.sin(self.m)
        return torch.where(cos >= math.cos(math.pi - self.m), torch.cos(angle(cos) + self.m), beyond)

    def device_numbers(self) -> tuple[float, ...]:
        cosine, sine = math.cos(self.m), math.sin(self.m)
        return cosine, sine, math.cos(math.pi - self.m), self.m * sine


@register
@dataclass(frozen=True)
class SubCenterArcFace(ArcFace):
    """ArcFace with k centers per class, of which the nearest one counts (Sub-center ArcFace, 2020).

    Noisy samples of a class gather at separate centers. A head has k adjacent weight vectors per class.
    """

    name: ClassVar[str] = "subcenter-arcface"
    aliases: ClassVar[tuple[str, ...]] = ("sub-center-arcface", "sub-centre-arcface")
    about: ClassVar[str] = "s cos(theta_y + m), s cos(theta_j), theta_j the smallest angle to k centers"
    k: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(f"k of {self.name}", self.k, least=1)

    def centers(self) -> int:
        return self.k


@register
@dataclass(frozen=True)
class CombinedMargin(Margin):
    """s (psi(m1 theta_y + m2) - m3), psi(a) = (-1)^k cos(a) - 2k on [k pi, (k+1) pi] (ArcFace, 2019).

    Up to pi, psi is the cosine; beyond pi it keeps decreasing.
    """

    name: ClassVar[str] = "combined"
    aliases: ClassVar[tuple[str, ...]] = ("combined-margin",)
    about: ClassVar[str] = "s (cos(m1 theta_y + m2) - m3), s cos(theta_j)"
    scale: ClassVar[float | None] = 64.0
    device: ClassVar[Any] = staticmethod(device_margins.combined)
    m1: float = 1.0
    m2: float = 0.3
    m3: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m1 of {self.name}", self.m1, above=0, most=MOST_PIECES)
        check_number(f"m2 of {self.name}", self.m2, least=0, below=math.pi / 2)
        check_number(f"m3 of {self.name}", self.m3, least=0, below=2)

    def target(self, cos: Tensor) -> Tensor:
        theta = self.m1 * angle(cos) + self.m2
        k = torch.floor(theta.detach() / math.pi)
        return (1 - 2 * torch.remainder(k, 2)) * torch.cos(theta) - 2 * k - self.m3

    def device_numbers(self) -> tuple[float, ...]:
        return self.m1, self.m2, self.m3


@register
@dataclass(frozen=True)
class NormFace(Margin):
    """s cos(theta_j): features and weights of norm 1."""

    name: ClassVar[str] = "normface"
    aliases: ClassVar[tuple[str, ...]] = ("normalized-softmax", "norm-softmax", "nsl")
    about: ClassVar[str] = "s cos(theta_j)"
    scale: ClassVar[float | None] = 20.0
    device: ClassVar[Any] = staticmethod(device_margins.plain)


@register
@dataclass(frozen=True)
class L2Softmax(Margin):
    """W_j (s x / ||x||) + b_j: features on a sphere of radius s."""

    name: ClassVar[str] = "l2-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("l2-constrained-softmax",)
    about: ClassVar[str] = "W_j (s x / ||x||) + b_j"
    unit_weights: ClassVar[bool] = False
    bias: ClassVar[bool] = True
    scale: ClassVar[float | None] = 16.0


@register
@dataclass(frozen=True)
class SphereFaceR(Margin):
    """s cos(min(m theta_y, pi)) for version 1, and s cos(theta_j / m) for the others in version 2 (SphereFace Revived).

    With `detach`, as in the authors' code, the gradient is that of the cosine without the margin.
    """

    name: ClassVar[str] = "sphereface-r"
    aliases: ClassVar[tuple[str, ...]] = ("sphereface-revived",)
    about: ClassVar[str] = "s cos(min(m theta_y, pi)), s cos(theta_j)"
    scale: ClassVar[float | None] = 30.0
    device: ClassVar[Any] = staticmethod(device_margins.stopped)
    m: float = 1.5
    version: int = 1
    detach: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=1)
        if isinstance(self.version, bool) or self.version not in (1, 2):
            raise ValueError(f"version of {self.name} must be 1 or 2, not {self.version!r}")
        check_flag(f"detach of {self.name}", self.detach)

    def target(self, cos: Tensor) -> Tensor:
        if self.version == 2:
            return cos
        return self._with_gradient(cos, lambda c: torch.cos(at_most(self.m * angle(c), math.pi)))

    def others(self, cos: Tensor) -> Tensor:
        if self.version == 1:
            return cos
        return self._with_gradient(cos, lambda c: torch.cos(angle(c) / self.m))

    def _with_gradient(self, cos: Tensor, margin: Callable[[Tensor], Tensor]) -> Tensor:
        return cos + (margin(cos) - cos).detach() if self.detach else margin(cos)

    def device_numbers(self) -> tuple[float, ...] | None:
        return (self.m, float(self.detach)) if self.version == 1 else None
