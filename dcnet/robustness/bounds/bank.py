"""Decoupled layers: f(w, x) = h(||w||, ||x||) g(theta) of a bank of filters, in evaluation."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet import weighting
from dcnet.equation import norm_cancels, relative_to_mean
from dcnet.layers import Decoupled
from dcnet.norms import accumulation_dtype, filter_norm
from dcnet.operator import Operator
from dcnet.part import Value
from dcnet.robustness.bounds.angles import Bend, bend
from dcnet.robustness.bounds.magnitudes import Steepness, steepness

WEIGHTINGS = (weighting.Unweighted, weighting.LinearlyWeighted, weighting.Joint, weighting.Product)


@dataclass(frozen=True)
class Bank:
    """What holds of a(w) h(b(w) ||x||) g(theta), filter by filter.

    Args:
        units: the filters over their norms, which eps makes a little larger: [out, channels of a group, *kernel].
        steepness: of a h(b n) as a function of n = ||x||.
        bend: of g.
        shared: whether a h(b n) is the same for all filters, but for a factor.
        linear: whether it is a n, and g homogeneous, so that x and not ||x|| enters.
        nonnegative: whether f is never below 0.
        eps: of the norms.
    """

    units: Tensor
    steepness: Steepness
    bend: Bend
    shared: bool
    linear: bool
    nonnegative: bool
    eps: float

    @property
    def largest(self) -> Tensor:
        """The larger of the two slopes of the magnitude, [out]."""
        return torch.maximum(self.steepness.chord, self.steepness.slope)

    @property
    def outward(self) -> Tensor:
        """How fast f changes as the patch grows, over |<u, x>| / |x|, for an angle that is steep at its ends; [out].

        max over r = sqrt(eps) / n of pi / 2 slope (1 - r^2) + chord r.
        """
        chord, slope = self.steepness.chord, self.steepness.slope
        r = torch.where(slope > 0, chord / (math.pi * slope), math.inf).clamp(max=1)
        return math.pi / 2 * slope * (1 - r * r) + chord * r

    @property
    def gradients(self) -> Tensor:
        """No gradient of f by its patch is longer, over ||u||; [out]."""
        if self.bend.by_angle:
            return self.bend.slope * torch.hypot(self.steepness.chord, self.outward)
        return self.bend.slope * self.largest


def bank_of(layer: Decoupled) -> Bank:
    """The bank of a layer with its constants and its mean norm as they are, or a ValueError of one clause."""
    op, weight = layer.operator, layer.weight.detach().double()
    if type(op.weighting) not in WEIGHTINGS:
        raise ValueError(f"has the weighting {op.weighting.name!r}, of which no slope is known")
    own, constants = _constants(layer)
    w_norm = filter_norm(weight, layer.eps)
    ones = torch.ones_like(w_norm)
    factor = ones * op.weighting.factor(w_norm, lambda n: op.h(n, own), op.alpha(own))
    inner = op.weighting.argument(w_norm, ones)
    steep = _steepness(op, inner * _smallest_norm(layer), constants)
    outer, angle = factor.abs(), bend(op.angle, {name: constants[name] for name in op.angle.slots()})
    slopes = Steepness(outer * inner * steep.chord, outer * inner * steep.slope, outer * steep.top, steep.fades)
    linear = norm_cancels(op)
    shared = linear or (_uniform(op, constants) and type(op.weighting) is not weighting.Joint)
    nonnegative = angle.nonnegative and steep.fades and bool((factor >= 0).all())
    units = weight / w_norm.view(-1, *[1] * (weight.dim() - 1))
    return Bank(units, slopes, angle, shared, linear, nonnegative, layer.eps)


def plain_weight(layer: Decoupled) -> Tensor | None:
    """The filters with which a plain layer does the same, where there are such."""
    op, weight = layer.operator, layer.weight.detach().double()
    if not (norm_cancels(op) and op.angle.identity):
        return None
    own, _ = _constants(layer)
    w_norm = filter_norm(weight, layer.eps)
    factor = op.weighting.factor(w_norm, lambda n: op.h(n, own), op.alpha(own))
    size = op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), own) * factor / w_norm
    return weight * size.view(-1, *[1] * (weight.dim() - 1))


def _constants(layer: Decoupled) -> tuple[dict[str, Value], dict[str, Value]]:
    """The constants in float64: as they are, and with a relative radius times the running mean norm."""
    given = layer.constants()
    own = {name: value.detach().double() if isinstance(value, Tensor) else value for name, value in given.items()}
    mean, like = layer._buffers.get("mean_norm"), torch.empty(0, dtype=torch.float64)
    return own, relative_to_mean(layer.operator, own, like, {"operator": layer.operator, "mean_norm": mean})


def _smallest_norm(layer: Decoupled) -> float:
    """||x|| of a patch of zeros; without eps, the smallest number whose root the layer takes."""
    return math.sqrt(layer.eps or torch.finfo(accumulation_dtype(layer.weight.dtype)).tiny)


def _steepness(op: Operator, smallest: Tensor, constants: dict[str, Value]) -> Steepness:
    parts = op.magnitude.parts
    endings = [f"_{i}" if len(parts) > 1 else "" for i in range(len(parts))]
    own: list[dict[str, Any]] = [
        {name: constants[name + ending] for name in part.slots()} for part, ending in zip(parts, endings, strict=True)
    ]
    found = [steepness(part, smallest, values) for part, values in zip(parts, own, strict=True)]
    return sum(found[1:], start=found[0])


def _uniform(op: Operator, constants: dict[str, Value]) -> bool:
    """Whether all filters have the same magnitude."""
    of_h = (value for name, value in constants.items() if name not in op.angle.slots())
    return all(not isinstance(value, Tensor) or bool((value == value.flatten()[0]).all()) for value in of_h)
