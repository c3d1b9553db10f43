"""The later margins of SphereFace's authors: one with a detached margin, and one that decides each class by itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dcnet.learnable import check_number
from dcnet.limits import at_most, between
from dcnet.losses.margin import Margin, angle, register
from dcnet.losses.margins import check_added, check_multiple


@register
@dataclass(frozen=True)
class SphereFaceR(Margin):
    """s cos(min(m theta_y, pi)) for version 1, and s cos(theta_j / m) for the others in version 2 (SphereFace Revived).

    With `detach` the margin itself has no gradient, as the authors have it: that of the cosine is used in its place.
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
        check_multiple(self.name, self.m)
        if isinstance(self.version, bool) or self.version not in (1, 2):
            raise ValueError(f"version of {self.name} must be 1 or 2, not {self.version!r}")
        if not isinstance(self.detach, bool):
            raise TypeError(f"detach of {self.name} must be True or False, not {self.detach!r}")

    def target(self, cos: Tensor) -> Tensor:
        if self.version == 2:
            return cos
        return self._passed(cos, lambda c: torch.cos(at_most(self.m * angle(c), math.pi)))

    def others(self, cos: Tensor) -> Tensor:
        if self.version == 1:
            return cos
        return self._passed(cos, lambda c: torch.cos(angle(c) / self.m))

    def _passed(self, cos: Tensor, margin: Callable[[Tensor], Tensor]) -> Tensor:
        return cos + (margin(cos) - cos).detach() if self.detach else margin(cos)


@register
@dataclass(frozen=True)
class SphereFace2(Margin):
    """Each class by itself: r (g(cos) - m) + b for the label, r (g(cos) + m) + b for others; g(c) = 2((c+1)/2)^t - 1.

    The loss is `share` / r of the logistic loss of the label, and (1 - share) / r of the sum of those of all others.
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
        check_added(self.name, self.m, 1.0)
        check_number(f"t of {self.name}", self.t)
        if self.t < 1:
            raise ValueError(f"t of {self.name} must be 1 or more, not {self.t!r}")
        check_number(f"share of {self.name}", self.share)
        if not 0 < self.share < 1:
            raise ValueError(f"share of {self.name} must be between 0 and 1, not {self.share!r}")

    def target(self, cos: Tensor) -> Tensor:
        return self._stretched(cos) - self.m

    def others(self, cos: Tensor) -> Tensor:
        return self._stretched(cos) + self.m

    def _stretched(self, cos: Tensor) -> Tensor:
        return 2 * ((between(cos, -1.0, 1.0) + 1) / 2) ** self.t - 1

    def label_share(self) -> float:
        return self.share

    def first_bias(self, classes: int, scale: float) -> float:
        """b with which label and others pull equally at orthogonal weights."""
        odds = self.share / ((1 - self.share) * max(classes - 1, 1))
        zero = 2 * 0.5**self.t - 1
        label, others = scale * (zero - self.m), scale * (zero + self.m)
        root = math.sqrt((1 - odds) ** 2 + 4 * odds * math.exp(label - others))
        # One formula in three ways: where the label outweighs the others, 1 - odds + root is a difference of almost
        # equal numbers, and where it weighs as much, the root may be too small for a number.
        if odds > 1:
            return math.log((root + odds - 1) / 2) - label
        if odds == 1:
            return -(label + others) / 2
        return math.log(2 * odds) - others - math.log(1 - odds + root)
