"""Binary margins: each class has its own logistic loss, and all classes share one threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dcnet.checks import check_number
from dcnet.clamp import between
from dcnet.losses.margins import Margin, register


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
    m: float = 0.4
    balance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"m of {self.name}", self.m, least=0, below=2)
        check_number(f"balance of {self.name}", self.balance, above=0)

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.m

    def loss_weights(self, scale: Tensor) -> tuple[Tensor | float, Tensor | float]:
        return 1.0, self.balance

    def first_bias(self, classes: int, scale: float) -> float:
        """-t with the authors' initial t = log(10 C)."""
        return -math.log(10 * classes)
