"""How steep a magnitude h is: the largest |h(n)| / n, the largest |h'(n)| and the largest |h(n)|, by its constants."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcnet import magnitude
from dcnet.magnitude import Magnitude


@dataclass(frozen=True)
class Steepness:
    """What holds of h(n) for every n from a smallest one on, filter by filter.

    Args:
        chord: no less than |h(n)| / n, [out].
        slope: no less than |h'(n)|, [out].
        top: no less than |h(n)|, [out]; infinite where h has no bound.
        fades: whether 0 <= n h'(n) <= h(n), so that h / n never grows.
    """

    chord: Tensor
    slope: Tensor
    top: Tensor
    fades: bool

    def __add__(self, other: "Steepness") -> "Steepness":
        return Steepness(
            self.chord + other.chord, self.slope + other.slope, self.top + other.top, self.fades and other.fades
        )


Rule = Callable[..., Steepness]
Kind = TypeVar("Kind", bound=Rule)
rules: dict[type[Magnitude], Rule] = {}


def register(kind: type[Magnitude]) -> Callable[[Kind], Kind]:
    """A decorator that enters the rule of a magnitude: from it, the smallest norms [out] and its constants."""

    def enter(rule: Kind) -> Kind:
        rules[kind] = rule
        return rule

    return enter


def steepness(part: Magnitude, smallest: Tensor, constants: dict[str, Any]) -> Steepness:
    """What holds of the part at norms of `smallest`, [out], and more."""
    # By the very class, since one that is derived from it may compute something else.
    if type(part) not in rules:
        raise ValueError(f"has the magnitude {part.spec()!r}, of which no slope is known")
    return rules[type(part)](part, smallest, **{name: _spread(value, smallest) for name, value in constants.items()})


def _spread(value: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like)


def _unbounded(like: Tensor) -> Tensor:
    return torch.full_like(like, math.inf)


@register(magnitude.Sphere)
def _sphere(part: Magnitude, smallest: Tensor, scale: Tensor) -> Steepness:
    return Steepness(scale / smallest, torch.zeros_like(scale), scale, True)


@register(magnitude.Ball)
@register(magnitude.Tanh)
def _saturating(part: Magnitude, smallest: Tensor, scale: Tensor, radius: Tensor) -> Steepness:
    return Steepness(scale / radius, scale / radius, scale, True)


@register(magnitude.Linear)
def _linear(part: Magnitude, smallest: Tensor, scale: Tensor) -> Steepness:
    return Steepness(scale.abs(), scale.abs(), _unbounded(scale), bool((scale >= 0).all()))


@register(magnitude.Segmented)
def _segmented(part: Magnitude, smallest: Tensor, scale: Tensor, slope: Tensor, radius: Tensor) -> Steepness:
    steepest = torch.maximum(scale.abs(), slope.abs())
    top = torch.where(slope == 0, scale.abs() * radius, math.inf)
    return Steepness(steepest, steepest, top, bool(((slope >= 0) & (scale >= slope)).all()))


@register(magnitude.Log)
def _log(part: Magnitude, smallest: Tensor, scale: Tensor) -> Steepness:
    return Steepness(scale.abs(), scale.abs(), _unbounded(scale), bool((scale >= 0).all()))


@register(magnitude.Mix)
def _mix(part: Magnitude, smallest: Tensor, scale: Tensor, log_scale: Tensor) -> Steepness:
    return _linear(part, smallest, scale) + _log(part, smallest, log_scale)


@register(magnitude.Sharp)
def _sharp(part: magnitude.Sharp, smallest: Tensor, offset: Tensor) -> Steepness:
    """Both are largest in one place, from which they fall to both sides, or at the smallest norm if that is later."""
    p = part.power
    at = torch.maximum((p - 1) * offset, smallest)
    chord = (at / (at + offset)).pow(p) / at
    at = torch.maximum((p - 1) / 2 * offset, smallest)
    slope = p * offset * at.pow(p - 1) / (at + offset).pow(p + 1)
    return Steepness(chord, slope, torch.ones_like(offset), p <= 1)
