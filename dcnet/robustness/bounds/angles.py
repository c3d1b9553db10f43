"""How steep an angle g is as a function of the cosine, or, where that is infinite at its ends, of the angle itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcnet import angle
from dcnet.angle import Angle


@dataclass(frozen=True)
class Bend:
    """What holds of g(c) for every c in [-1, 1]; g(0) = 0 and |g| <= 1 of all of them.

    Args:
        slope: no less than |dg/dc|, or than |dg/dtheta| if `by_angle`; [out], or one for all.
        by_angle: whether dg/dc has no bound.
        rises: whether 0 <= g(c) / c <= g'(c), so that g / c never falls as |c| grows.
        homogeneous: whether g(a c) = a g(c) for a >= 0: then g is c, or c where it is positive.
        nonnegative: whether g is never below 0.
    """

    slope: Tensor
    by_angle: bool = False
    rises: bool = False
    homogeneous: bool = False
    nonnegative: bool = False


Rule = Callable[..., Bend]
Kind = TypeVar("Kind", bound=Rule)
rules: dict[type[Angle], Rule] = {}


def register(kind: type[Angle]) -> Callable[[Kind], Kind]:
    """A decorator that enters the rule of an angle: from it and its constants, in float64."""

    def enter(rule: Kind) -> Kind:
        rules[kind] = rule
        return rule

    return enter


def bend(part: Angle, constants: dict[str, Any]) -> Bend:
    if type(part) not in rules:
        raise ValueError(f"has the angle {part.spec()!r}, of which no slope is known")
    return rules[type(part)](part, **constants)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@register(angle.Cosine)
def _cosine(part: Angle) -> Bend:
    return Bend(_number(1), rises=True, homogeneous=True)


@register(angle.ReluCosine)
def _relu(part: Angle) -> Bend:
    return Bend(_number(1), rises=True, homogeneous=True, nonnegative=True)


@register(angle.SquareCosine)
def _square(part: Angle) -> Bend:
    return Bend(_number(2), rises=True)


@register(angle.Power)
def _power(part: angle.Power) -> Bend:
    return Bend(_number(part.p), rises=True)


@register(angle.Linear)
def _linear(part: Angle) -> Bend:
    return Bend(_number(2 / math.pi), by_angle=True)


@register(angle.Sigmoid)
def _sigmoid(part: Angle, k: float | Tensor) -> Bend:
    steep = torch.as_tensor(k, dtype=torch.float64)
    return Bend(1 / (2 * steep * torch.tanh(math.pi / (4 * steep))), by_angle=True)


@register(angle.Spline)
def _spline(part: angle.Spline, slopes: Tensor) -> Bend:
    """The slope runs linearly from knot to knot, so that it is largest at one of them."""
    half = part.segments // 2
    areas = [(side[:-1] + side[1:]).sum() / 2 for side in (slopes[half:], slopes[: half + 1])]
    return Bend(half * slopes.max() / torch.maximum(*areas))
