"""Margins: functions of the cosine between a feature and the weights of its class, and of the other classes.

theta_j is the angle between the feature x and the weights W_j of class j; y is the label of x. A new margin is one
class with `@register`, here or in another file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcnet.angle import safe_asin
from dcnet.checks import check_flag, check_number
from dcnet.clamp import at_most, between
from dcnet.parameters import convert_numbers
from dcnet.registry import Registry
from dcnet.spec import format_call, parse_call

# d theta / d cos is infinite at cos = 1 and -1; it is limited where 1 - cos^2 is below this.
DELTA = 1e-6
# The largest m, since psi has m pieces that are computed one by one.
MOST_PIECES = 1000


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
        scale: the default s of a head; None for ||x||.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    unit_weights: ClassVar[bool] = True
    bias: ClassVar[bool] = False
    binary: ClassVar[bool] = False
    annealed: ClassVar[bool] = False
    scale: ClassVar[float | None] = None

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

    def label_share(self) -> float:
        """The weight of the label's loss relative to that of all other classes, in a binary margin."""
        return 0.5

    def first_bias(self, classes: int, scale: float) -> float:
        """The initial offset of all logits, in a binary margin."""
        return 0.0


def _plain(name: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[-_\s]", "", name).lower()


registry: Registry[type[Margin]] = Registry("a margin", normalize=_plain)
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


def monotone_cosine(cos: Tensor, m: float) -> Tensor:
    """psi = (-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m]: cos(m theta) made to decrease over all of [0, pi]."""
    cos = between(cos, -1.0, 1.0)
    bounds = [math.cos(k * math.pi / m) for k in range(1, math.ceil(m))]
    k = torch.zeros_like(cos)
    for bound in bounds:
        k = k + (cos < bound).to(cos.dtype)
    sign = 1 - 2 * torch.remainder(k, 2)
    wave = CHEBYSHEV[m](cos) if m in CHEBYSHEV else torch.cos(m * angle(cos))
    return sign * wave - 2 * k


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
    m: float = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=1, most=MOST_PIECES)

    def target(self, cos: Tensor) -> Tensor:
        return monotone_cosine(cos, self.m)


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
    m: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=2)

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.m


@register
@dataclass(frozen=True)
class ArcFace(Margin):
    """s cos(theta_y + m), and s (cos(theta_y) - m sin(m)) where theta_y + m exceeds pi, so that it keeps decreasing."""

    name: ClassVar[str] = "arcface"
    aliases: ClassVar[tuple[str, ...]] = ("aam-softmax", "additive-angular-margin-softmax")
    about: ClassVar[str] = "s cos(theta_y + m), s cos(theta_j)"
    scale: ClassVar[float | None] = 64.0
    m: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=math.pi / 2)

    def target(self, cos: Tensor) -> Tensor:
        beyond = cos - self.m * math.sin(self.m)
        return torch.where(cos >= math.cos(math.pi - self.m), torch.cos(angle(cos) + self.m), beyond)


@register
@dataclass(frozen=True)
class NormFace(Margin):
    """s cos(theta_j): features and weights of norm 1."""

    name: ClassVar[str] = "normface"
    aliases: ClassVar[tuple[str, ...]] = ("normalized-softmax", "norm-softmax", "nsl")
    about: ClassVar[str] = "s cos(theta_j)"
    scale: ClassVar[float | None] = 20.0


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


@register
@dataclass(frozen=True)
class SphereFace2(Margin):
    """Binary: r (g(cos) - m) + b for the label, r (g(cos) + m) + b for the others; g(c) = 2((c+1)/2)^t - 1.

    The loss is `share` / r times the logistic loss of the label plus (1 - share) / r times the sum of all others.
    """

    name: ClassVar[str] = "sphereface2"
    about: ClassVar[str] = "s (g(cos(theta_y)) - m) + b, s (g(cos(theta_j)) + m) + b, g(c) = 2((c + 1)/2)^t - 1"
    binary: ClassVar[bool] = True
    scale: ClassVar[float | None] = 40.0
    m: float = 0.4
    t: float = 3.0
    share: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=1)
        check_number(f"t of {self.name}", self.t, least=1)
        check_number(f"share of {self.name}", self.share, above=0, below=1)

    def target(self, cos: Tensor) -> Tensor:
        return self._similarity(cos) - self.m

    def others(self, cos: Tensor) -> Tensor:
        return self._similarity(cos) + self.m

    def _similarity(self, cos: Tensor) -> Tensor:
        return 2 * ((between(cos, -1.0, 1.0) + 1) / 2) ** self.t - 1

    def label_share(self) -> float:
        return self.share

    def first_bias(self, classes: int, scale: float) -> float:
        """The b at which, for orthogonal weights, the label and the other classes have gradients of equal size."""
        odds = self.share / ((1 - self.share) * max(classes - 1, 1))
        zero = 2 * 0.5**self.t - 1
        label, others = scale * (zero - self.m), scale * (zero + self.m)
        root = math.sqrt((1 - odds) ** 2 + 4 * odds * math.exp(label - others))
        # One formula in three forms: for odds > 1 the last form subtracts almost equal numbers, and for odds = 1 the
        # root may underflow.
        if odds > 1:
            return math.log((root + odds - 1) / 2) - label
        if odds == 1:
            return -(label + others) / 2
        return math.log(2 * odds) - others - math.log(1 - odds + root)
