"""Bounds of decoupled and plain layers; the derivation is in docs/robustness_bounds.md."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dcnet import weighting
from dcnet.angle import AngleSlopes
from dcnet.component import belongs_to
from dcnet.eager import relative_to_mean, scaled
from dcnet.layers import Decoupled
from dcnet.magnitude import MagnitudeSlopes
from dcnet.norms import accumulation_dtype, filter_norm
from dcnet.operator import Operator
from dcnet.parameters import Value
from dcnet.robustness.certificates.matrices import SLACK, Signal, Window

# Upper bounds of ||A U P + B U e e^T|| / ||U||, where P projects out e, and A and B are diagonal: for 0 <= B <= A <= 1,
# and for |A|, |B| <= 1. The ratio is 1 only if A and B are equal for all filters.
FADING, ANY = 2 / math.sqrt(3), math.sqrt(2)
WEIGHTINGS = (weighting.Unweighted, weighting.LinearlyWeighted, weighting.Joint, weighting.Product)


@dataclass(frozen=True)
class Bank:
    """Bounds on f = a(w) h(b(w) ||x||) g(theta) of each filter.

    Args:
        units: the filters divided by their norms, which include eps: [out, channels of a group, *kernel].
        magnitude: slopes of a h(b n) as a function of n = ||x||.
        angle: slopes of g.
        shared: whether a h(b n) is equal for all filters up to a factor.
        linear: whether f is a n g with a homogeneous g, so that n cancels.
        nonnegative: whether f >= 0.
        eps: added under the square root of the norms.
    """

    units: Tensor
    magnitude: MagnitudeSlopes
    angle: AngleSlopes
    shared: bool
    linear: bool
    nonnegative: bool
    eps: float

    @cached_property
    def lengths(self) -> Tensor:
        """The norms of the units, [out]."""
        return torch.linalg.vector_norm(self.units.flatten(1), dim=1)

    @property
    def largest(self) -> Tensor:
        """The larger of the two slopes of the magnitude, [out]."""
        return torch.maximum(self.magnitude.chord, self.magnitude.slope)

    @property
    def outward(self) -> Tensor:
        """A bound on the slope of f along the patch, divided by |<u, x>| / |x|, for angles with infinite dg/dc; [out].

        It is the maximum over r = sqrt(eps) / n of pi / 2 slope (1 - r^2) + chord r.
        """
        chord, slope = self.magnitude.chord, self.magnitude.slope
        r = torch.where(slope > 0, chord / (math.pi * slope), math.inf).clamp(max=1)
        return math.pi / 2 * slope * (1 - r * r) + chord * r

    @cached_property
    def gradients(self) -> Tensor:
        """A bound on the norm of the gradient of f with respect to its patch, divided by ||u||; [out]."""
        if self.angle.by_angle:
            return self.angle.slope * torch.hypot(self.magnitude.chord, self.outward)
        return self.angle.slope * self.largest

    def norm(self, scale: Tensor, groups: int) -> float:
        """A bound on the L2 norm of the Jacobian of scale * f with respect to one patch; `scale` is [out]."""
        rows = self.gradients * scale.abs() * self.lengths
        frobenius = float(rows.square().view(groups, -1).sum(1).sqrt().max()) * SLACK
        return min(frobenius, self._spectral_norm(scale.abs() * self.angle.slope, groups))

    def _spectral_norm(self, scale: Tensor, groups: int) -> float:
        def norm(sizes: Tensor) -> Tensor:
            weighted = self.units.flatten(1) * (sizes * scale)[:, None]
            return torch.linalg.matrix_norm(weighted.unflatten(0, (groups, -1)), 2) * SLACK

        if self.angle.by_angle:
            return float(torch.hypot(2 * norm(self.magnitude.chord), norm(self.outward)).max())
        exact = self.angle.homogeneous and self.shared
        factor = 1.0 if exact else FADING if self.angle.rises and self.magnitude.fades else ANY
        return factor * float(norm(self.largest).max())


def bank_of(layer: Decoupled) -> Bank:
    """The bank of a layer with its current constants and mean norm."""
    op, weight = layer.operator, layer.weight.detach().double()
    if type(op.weighting) not in WEIGHTINGS:
        raise ValueError(f"has the weighting {op.weighting.name!r}, whose slope has no known bound")
    own, constants = _constants(layer)
    w_norm = filter_norm(weight, layer.eps)
    ones = torch.ones_like(w_norm)
    factor = ones * op.factor(w_norm, own)
    inner = op.weighting.argument(w_norm, ones)
    steep = _magnitude_slopes(op, inner * _smallest_norm(layer), constants)
    outer, angle = factor.abs(), _angle_slopes(op, constants)
    slopes = MagnitudeSlopes(outer * inner * steep.chord, outer * inner * steep.slope, outer * steep.top, steep.fades)
    linear = op.norm_cancels
    shared = linear or (_uniform(op, constants) and type(op.weighting) is not weighting.Joint)
    nonnegative = angle.nonnegative and steep.fades and bool((factor >= 0).all())
    units = weight / w_norm.view(-1, *[1] * (weight.dim() - 1))
    return Bank(units, slopes, angle, shared, linear, nonnegative, layer.eps)


def plain_weight(layer: Decoupled) -> Tensor | None:
    """The filters of the plain layer that computes the same; None if there is none."""
    op, weight = layer.operator, layer.weight.detach().double()
    if not (op.norm_cancels and op.angle.identity):
        return None
    own, _ = _constants(layer)
    w_norm = filter_norm(weight, layer.eps)
    factor = op.factor(w_norm, own)
    size = op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), own) * factor / w_norm
    return scaled(weight, size)


def _constants(layer: Decoupled) -> tuple[dict[str, Value], dict[str, Value]]:
    """The constants in float64: as stored, and with a relative radius times the running mean norm."""
    given = layer.constants()
    own = {name: value.detach().double() if isinstance(value, Tensor) else value for name, value in given.items()}
    mean, like = layer._buffers.get("mean_norm"), torch.empty(0, dtype=torch.float64)
    return own, relative_to_mean(layer.operator, own, like, {"operator": layer.operator, "mean_norm": mean})


def _smallest_norm(layer: Decoupled) -> float:
    """||x|| of a patch of zeros; without eps, the root of the smallest positive number."""
    return math.sqrt(layer.eps or torch.finfo(accumulation_dtype(layer.weight.dtype)).tiny)


def _magnitude_slopes(op: Operator, smallest: Tensor, constants: dict[str, Value]) -> MagnitudeSlopes:
    found: list[MagnitudeSlopes] = []
    for magnitude, term in zip(op.magnitude.parts, op.magnitude_terms, strict=True):
        # A subclass that computes something else has no bounds, even if its parent class has some.
        if not belongs_to(magnitude, "slopes", "value"):
            raise ValueError(f"has the magnitude {magnitude.spec()!r}, whose slope has no known bound")
        own = {name: _per_filter(value, smallest) for name, value in term.own_constants(constants).items()}
        found.append(magnitude.slopes(smallest, **own))
    return sum(found[1:], start=found[0])


def _per_filter(value: Value, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like)


def _angle_slopes(op: Operator, constants: dict[str, Value]) -> AngleSlopes:
    if not belongs_to(op.angle, "slopes", "value"):
        raise ValueError(f"has the angle {op.angle.spec()!r}, whose slope has no known bound")
    return op.angle.slopes(**op.angle_term.own_constants(constants))


def _uniform(op: Operator, constants: dict[str, Value]) -> bool:
    """Whether all filters have the same magnitude."""
    of_h = (value for name, value in constants.items() if name not in op.angle.slots())
    return all(not isinstance(value, Tensor) or bool((value == value.flatten()[0]).all()) for value in of_h)


def affine(signal: Signal, weight: Tensor, bias: Tensor | None, window: Window) -> Signal:
    """The bounds after a convolution or fully connected layer with filters [out, channels of a group, *kernel]."""
    filters = len(weight)
    sums = _tap_sums(weight.abs())
    rows = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    moved = (sums * window.per_filter(signal.linf, filters)).sum(1)
    low, high = _interval(signal, weight, bias, window)
    return Signal(
        (filters, *window.outputs),
        torch.minimum(moved, rows * signal.l2 * window.lengthened) * SLACK,
        low,
        high,
        lambda scale: signal.l2 * window.norm(scaled(weight, scale)),
        None if window.sides else lambda: _differences(signal, weight),
    )


def with_zeros(signal: Signal, window: Window) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the values, including zero padding."""
    if not window.zeros:
        return signal.low, signal.high
    return signal.low.clamp(max=0), signal.high.clamp(min=0)


def _tap_sums(weight: Tensor) -> Tensor:
    return weight.flatten(2).sum(2) if weight.dim() > 2 else weight


def _interval(signal: Signal, weight: Tensor, bias: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
    low, high = with_zeros(signal, window)
    offset = weight.new_zeros(len(weight)) if bias is None else bias
    if not signal.bounded:
        return torch.full_like(offset, -math.inf), torch.full_like(offset, math.inf)
    up, down = _tap_sums(weight.clamp(min=0)), _tap_sums(weight.clamp(max=0))
    lows, highs = window.per_filter(low, len(weight)), window.per_filter(high, len(weight))
    return (up * lows + down * highs).sum(1) + offset, (up * highs + down * lows).sum(1) + offset


def _differences(signal: Signal, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on the difference of two outputs, whose filter is the difference of their filters."""
    together = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist") * signal.l2
    moved, width = weight * signal.moved, weight * signal.width
    lipschitz = torch.minimum(together, torch.cdist(moved, moved, p=1)) * SLACK
    spread = torch.cdist(width, width, p=1) * SLACK if signal.bounded else torch.full_like(lipschitz, math.inf)
    return lipschitz, spread


def decoupled(signal: Signal, bank: Bank, bias: Tensor | None, window: Window) -> Signal:
    """The bounds after a decoupled layer, f(w, x) + bias."""
    filters, patches = len(bank.units), signal.l2 * window.repeated
    patch = window.patch_length(signal.linf, filters).clamp(max=signal.l2 * window.lengthened)
    moved = torch.minimum(_moved(signal, bank, window), bank.gradients * bank.lengths * patch) * SLACK
    low, high = _interval_decoupled(signal, bank, bias, window)
    return Signal((filters, *window.outputs), moved, low, high, lambda scale: patches * bank.norm(scale, window.groups))


def _moved(signal: Signal, bank: Bank, window: Window) -> Tensor:
    """A bound on the movement of f if each value moves by the bound of its channel; [out]."""
    filters = len(bank.units)
    each = (_tap_sums(bank.units.abs()) * window.per_filter(signal.linf, filters)).sum(1)
    together = bank.lengths * window.patch_length(signal.linf, filters)
    if bank.linear:
        return bank.gradients * each
    if bank.angle.rises and bank.magnitude.fades:
        return bank.gradients * (each + together) / 2
    return bank.gradients * together


def _interval_decoupled(signal: Signal, bank: Bank, bias: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
    """The range of the outputs: |f| <= |h|, which is at most its bound, and its chord times the largest patch norm."""
    top = bank.magnitude.top
    if signal.bounded:
        low, high = with_zeros(signal, window)
        longest = window.patch_length(torch.maximum(low.abs(), high.abs()), len(bank.units))
        longest = (longest.square() + bank.eps).sqrt()
        top = torch.minimum(top, bank.magnitude.chord * longest * SLACK)
    offset = torch.zeros_like(top) if bias is None else bias
    return offset if bank.nonnegative else offset - top, offset + top
