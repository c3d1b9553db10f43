"""The margins of the literature; one more is one class here, or in a file of one's own."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet.learnable import check_number
from dcnet.losses.margin import Margin, angle, multiplied, register

# psi is pieced together one after the other: of a billion parts the first step would never end.
MOST_PARTS = 1000


@register
@dataclass(frozen=True)
class Softmax(Margin):
    """W_j x + b_j: no margin."""

    name: ClassVar[str] = "softmax"
    about: ClassVar[str] = "W_j x + b_j"
    unit_weights: ClassVar[bool] = False
    bias: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class MSoftmax(Margin):
    """||x|| cos(theta_j): weights of norm 1, decided by angle alone."""

    name: ClassVar[str] = "m-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("modified-softmax",)
    about: ClassVar[str] = "||x|| cos(theta_j)"


@register
@dataclass(frozen=True)
class ASoftmax(Margin):
    """||x|| psi(theta_y), psi = (-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m] (SphereFace).

    For m = 1, 2, 3, 4 by Chebyshev's polynomials of the cosine, exactly; any other real m by the angle.
    """

    name: ClassVar[str] = "a-softmax"
    aliases: ClassVar[tuple[str, ...]] = ("sphereface", "angular-softmax")
    about: ClassVar[str] = "||x|| ((-1)^k cos(m theta_y) - 2k), ||x|| cos(theta_j)"
    eased: ClassVar[bool] = True
    m: float = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self.name, self.m)
        if self.m > MOST_PARTS:
            raise ValueError(f"m of {self.name} must be {MOST_PARTS} or less, as psi has so many parts, not {self.m!r}")

    def target(self, cos: Tensor) -> Tensor:
        return multiplied(cos, self.m)


@register
@dataclass(frozen=True)
class LSoftmax(ASoftmax):
    """||W_y|| ||x|| psi(theta_y): large-margin softmax, whose weights keep their norms."""

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
        check_added(self.name, self.m, 2.0)

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.m


@register
@dataclass(frozen=True)
class ArcFace(Margin):
    """s cos(theta_y + m), and s (cos(theta_y) - m sin(m)) where theta_y + m is beyond pi, so that it keeps falling."""

    name: ClassVar[str] = "arcface"
    aliases: ClassVar[tuple[str, ...]] = ("aam-softmax", "additive-angular-margin-softmax")
    about: ClassVar[str] = "s cos(theta_y + m), s cos(theta_j)"
    scale: ClassVar[float | None] = 64.0
    m: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_added(self.name, self.m, math.pi / 2)

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


def check_multiple(name: str, m: Any) -> None:
    check_number(f"m of {name}", m)
    if m < 1:
        raise ValueError(f"m of {name} multiplies the angle and must be 1 or more, not {m!r}")


def check_added(name: str, m: Any, limit: float) -> None:
    check_number(f"m of {name}", m)
    if not 0 <= m < limit:
        raise ValueError(f"m of {name} must be from 0 to less than {limit:.3g}, not {m!r}")
