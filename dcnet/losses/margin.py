"""Margins: what becomes of the cosine between a feature and the weights of its class, and of the others.

theta_j is the angle between the feature x and the weights W_j of class j; y is the label of x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dcnet.angle import safe_asin
from dcnet.learnable import take_plain_numbers
from dcnet.spec import made_by

# Below this the slope of theta by cos(theta) stops growing; it is infinite at theta = 0 and pi.
DELTA = 1e-6


@dataclass(frozen=True)
class Margin:
    """The logits s psi(theta_y) of the label and s eta(theta_j) of all others.

    `unit_weights` says that ||W_j|| counts as 1; `bias` that the classes have one; `scale` is the s that a head takes
    by default, None for ||x||; `binary` says that each class is decided by itself, and not by a softmax over all;
    `eased` that training needs annealing.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    unit_weights: ClassVar[bool] = True
    bias: ClassVar[bool] = False
    binary: ClassVar[bool] = False
    eased: ClassVar[bool] = False
    scale: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        take_plain_numbers(self)

    def __str__(self) -> str:
        """The spec, which `as_margin` reads; what is as by default is left out."""
        given = [
            (declared.name, getattr(self, declared.name), declared.default) for declared in dataclasses.fields(self)
        ]
        changed = [f"{name}={value!r}" for name, value, default in given if value != default]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    def target(self, cos: Tensor) -> Tensor:
        """psi, as a function of cos(theta_y)."""
        return cos

    def others(self, cos: Tensor) -> Tensor:
        """eta, as a function of cos(theta_j)."""
        return cos

    def label_share(self) -> float:
        """The weight of the label's own loss beside that of all others, where each class is decided by itself."""
        return 0.5

    def first_bias(self, classes: int, scale: float) -> float:
        """What is added to all logits at first, where each class is decided by itself."""
        return 0.0


registry: dict[str, type[Margin]] = {}
Kind = TypeVar("Kind", bound=type[Margin])


def register(kind: Kind) -> Kind:
    """Enters a margin into the registry under its name."""
    if kind.name in registry:
        raise ValueError(f"{kind.name!r} is taken: {registry[kind.name].__name__} is a margin of that name")
    registry[kind.name] = kind
    return kind


def as_margin(given: Margin | str) -> Margin:
    """The margin of a spec such as `a-softmax` or `arcface(m=0.3)`, or the margin itself."""
    if isinstance(given, Margin):
        return given
    margin: Margin = made_by(registry, "margin", str(given))
    return margin


def angle(cos: Tensor) -> Tensor:
    """theta, with a slope that stays finite at 0 and pi."""
    return math.pi / 2 - safe_asin(cos, DELTA)


def multiplied(cos: Tensor, m: float) -> Tensor:
    """(-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m]: cos(m theta) made to fall over all of [0, pi]."""
    cos = cos.clamp(-1, 1)
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
