"""Margins that are functions of the cosines alone: SphereFace, CosFace, ArcFace and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet.checks import check_flag, check_whole
from dcnet.clamp import at_most, between
from dcnet.losses import device_margins
from dcnet.losses.margins import Margin, angle, limited, register

# The largest m, since psi has m pieces that are computed one by one.
MOST_PIECES = 1000
# The largest number of centers of a class.
MOST_CENTERS = 1000


def added_angle(cos: Tensor, m: Tensor) -> Tensor:
    """cos(theta + m), and cos(theta) - m sin(m) where theta + m exceeds pi, so that it keeps decreasing."""
    return torch.where(cos >= -torch.cos(m), torch.cos(angle(cos) + m), cos - m * torch.sin(m))


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
    m: float = limited(4, least=1, most=MOST_PIECES)

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
    m: float = limited(2, least=1, most=MOST_PIECES)


@register
@dataclass(frozen=True)
class AMSoftmax(Margin):
    """s (cos(theta_y) - m): additive-margin softmax, or CosFace."""

    name: ClassVar[str] = "am-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("cosface", "additive-margin-softmax", "lmcl")
    about: ClassVar[str] = "s (cos(theta_y) - m), s cos(theta_j)"
    scale: ClassVar[float | None] = 30.0
    device: ClassVar[Any] = staticmethod(device_margins.subtracted)
    m: float = limited(0.35, least=0, below=2)

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
    m: float = limited(0.5, least=0, below=math.pi / 2)

    def target(self, cos: Tensor) -> Tensor:
        return added_angle(cos, cos.new_full((), self.m))

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
        check_whole(f"k of {self.name}", self.k, least=1, most=MOST_CENTERS)

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
    m1: float = limited(1.0, above=0, most=MOST_PIECES)
    m2: float = limited(0.3, least=0, below=math.pi / 2)
    m3: float = limited(0.2, least=0, below=2)

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
    m: float = limited(1.5, least=1)
    version: int = 1
    detach: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
    m: float = limited(0.4, least=0, below=1)
    t: float = limited(3.0, least=1)
    share: float = limited(0.7, above=0, below=1)

    def target(self, cos: Tensor) -> Tensor:
        return self._similarity(cos) - self.m

    def others(self, cos: Tensor) -> Tensor:
        return self._similarity(cos) + self.m

    def _similarity(self, cos: Tensor) -> Tensor:
        return 2 * ((between(cos, -1.0, 1.0) + 1) / 2) ** self.t - 1

    def loss_weights(self, scale: Tensor) -> tuple[Tensor | float, Tensor | float]:
        return self.share / scale, (1 - self.share) / scale

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


@register
@dataclass(frozen=True)
class UniFace(Margin):
    """Binary: s (cos(theta_y) - m) - t for the label, s cos(theta_j) - t for the others (UniFace, 2023).

    The threshold t is learned. The loss is the logistic loss of the label plus `balance` times the sum of all others.
    """

    name: ClassVar[str] = "uniface"
    aliases: ClassVar[tuple[str, ...]] = ("unified-cross-entropy", "uce")
    about: ClassVar[str] = "s (cos(theta_y) - m) - t, s cos(theta_j) - t, t learned"
    binary: ClassVar[bool] = True
    scale: ClassVar[float | None] = 64.0
    m: float = limited(0.4, least=0, below=2)
    balance: float = limited(1.0, above=0)

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.m

    def loss_weights(self, scale: Tensor) -> tuple[Tensor | float, Tensor | float]:
        return 1.0, self.balance

    def first_bias(self, classes: int, scale: float) -> float:
        """-t with the authors' initial t = log(10 C)."""
        return -math.log(10 * classes)
