"""Margins: what becomes of the cosine between a feature and the weights of its class, and of the others.

theta_j is the angle between the feature x and the weights W_j of class j; y is the label of x.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dcnet.angle import safe_asin
from dcnet.learnable import take_plain_numbers
from dcnet.limits import between
from dcnet.spec import made_by, unknown

# Below this the slope of theta by cos(theta) stops growing; it is infinite at theta = 0 and pi.
DELTA = 1e-6


@dataclass(frozen=True)
class Margin:
    """The logits s psi(theta_y) of the label and s eta(theta_j) of all others.

    Attributes:
        name: the name in the registry, with which a spec starts and which records have.
        about: both logits as formulas, for `dcnet list margins`.
        aliases: other names that a spec may start with.
        unit_weights: whether ||W_j|| counts as 1.
        bias: whether the classes have biases.
        binary: whether each class is decided by itself, and not by a softmax over all.
        eased: whether training needs annealing.
        scale: the default s of a head; None for ||x||.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
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
# The name in the registry of every other name of a margin.
aliases: dict[str, str] = {}
Kind = TypeVar("Kind", bound=type[Margin])


def register(kind: Kind) -> Kind:
    """Enters a margin into the registry under its name, and its other names into `aliases`."""
    # A subclass has the aliases of its parent only if it says so: they would be names of two margins.
    others = kind.__dict__.get("aliases", ())
    for name in (kind.name, *others):
        if taken := registry.get(aliases.get(name, name)):
            raise ValueError(f"{name!r} is taken: {taken.__name__} is a margin of that name")
    registry[kind.name] = kind
    aliases.update(dict.fromkeys(others, kind.name))
    return kind


def aliases_of(name: str) -> list[str]:
    """The other names of a margin in the registry."""
    return [alias for alias, meant in aliases.items() if meant == name]


def as_margin(given: Margin | str) -> Margin:
    """The margin of a spec such as `a-softmax`, `arcface(m=0.3)` or `cosface`, or the margin itself.

    Names may be aliases, and case, hyphens, underscores and spaces do not matter: `CosFace` and `am_softmax` are
    `am-softmax`, which is also the name that the margin prints.
    """
    if isinstance(given, Margin):
        return given
    spec = str(given)
    typed = spec.partition("(")[0]
    # Under the name that was typed, so that errors quote the spec as it is.
    margin: Margin = made_by({**registry, typed: registry[_canonical(typed)]}, "margin", spec)
    return margin


def _canonical(typed: str) -> str:
    """The name in the registry that is meant."""
    if typed in registry:
        return typed
    known = {_plain(name): name for name in registry} | {_plain(alias): meant for alias, meant in aliases.items()}
    if _plain(typed) not in known:
        raise unknown("margin", typed, [*registry, *aliases])
    return known[_plain(typed)]


def _plain(name: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[-_\s]", "", name).lower()


def angle(cos: Tensor) -> Tensor:
    """theta, with a slope that stays finite at 0 and pi."""
    return math.pi / 2 - safe_asin(cos, DELTA)


def multiplied(cos: Tensor, m: float) -> Tensor:
    """(-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m]: cos(m theta) made to fall over all of [0, pi]."""
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
