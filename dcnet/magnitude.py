"""Magnitudes h: functions of the patch norm (Sections 3.2.2 and 3.2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet import clamp
from dcnet.checks import check_number
from dcnet.component import Component, constant
from dcnet.cpu_passes import FastTanh, is_eager_on_cpu
from dcnet.device_functions import Block, at_most, constexpr, device_function, log1p, power, tanh, tl
from dcnet.parameters import Constant, Radius, RadiusLike, Value
from dcnet.registry import Registry


@dataclass(frozen=True)
class MagnitudeSlopes:
    """Upper bounds on a magnitude h(n) for all norms n above a smallest one, per filter.

    Args:
        chord: upper bound of |h(n)| / n, [out].
        slope: upper bound of |h'(n)|, [out].
        top: upper bound of |h(n)|, [out]; infinite if there is none.
        fades: whether 0 <= n h'(n) <= h(n), so that h / n never grows.
    """

    chord: Tensor
    slope: Tensor
    top: Tensor
    fades: bool

    def __add__(self, other: MagnitudeSlopes) -> MagnitudeSlopes:
        fades = self.fades and other.fades
        return MagnitudeSlopes(self.chord + other.chord, self.slope + other.slope, self.top + other.top, fades)


@dataclass(frozen=True)
class Magnitude(Component):
    """h(n) of a norm n > 0.

    `saturates` says that h never exceeds its scale, or 1 if it has none, `proportional` that h(n) = scale * n, so
    that a layer need not form the norm, `positive` that h > 0 if all its constants are, and `smooth` that h is
    differentiable everywhere. None means unknown.

    `device(n, *constants, *fixed, fast)` returns h and its derivatives with respect to n and the constants; see
    `dcnet.device_functions`. `slopes`, for robustness certificates, and `linear_slope`, for smoothed gradients, are
    optional.
    """

    saturates: ClassVar[bool | None] = False
    proportional: ClassVar[bool] = False
    positive: ClassVar[bool] = False
    smooth: ClassVar[bool | None] = True

    @property
    def bounded(self) -> bool | None:
        return self.saturates

    @property
    def vanishes(self) -> bool:
        """Whether h can be zero, so that the angle cannot be computed from h * g."""
        slots = self.slots().values()
        return not self.positive or any(not slot.positive and (slot.learned or slot.init <= 0) for slot in slots)

    @property
    def bound(self) -> float | None:
        """The largest value of h if it is finite and the same in every layer."""
        if not self.saturates:
            return None
        return self.fixed("scale") if "scale" in self.slots() else 1.0

    @property
    def parts(self) -> tuple[Magnitude, ...]:
        return (self,)

    def fixed(self, name: str) -> float | None:
        """The value of a constant that is neither learned nor relative, otherwise None."""
        slot = self.slots()[name]
        return None if slot.learned or slot.relative else slot.init

    def slopes(self, smallest: Tensor, *args: Any, **constants: Any) -> MagnitudeSlopes:
        """Bounds on h for norms n >= `smallest`; constants and results are [out]."""
        raise NotImplementedError(f"{type(self).__name__} does not define slopes(smallest, **constants)")

    def linear_slope(self, *args: Any, **constants: Any) -> Value | None:
        """The slope of the linear part of h, before it saturates or bends; None if h has no such part."""
        return None

    def __add__(self, other: Magnitude | Sum) -> Sum:
        return Sum(self.parts + other.parts) if isinstance(other, Magnitude | Sum) else NotImplemented


@dataclass(frozen=True)
class Sum:
    """h(n) = h_1(n) + h_2(n) + ..., each part with its own constants (Eq. 10 for any parts)."""

    parts: tuple[Magnitude, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a sum of magnitudes needs at least one part, but has none")

    @property
    def bounded(self) -> bool | None:
        return every(part.bounded for part in self.parts)

    @property
    def smooth(self) -> bool | None:
        return every(part.smooth for part in self.parts)

    @property
    def bound(self) -> float | None:
        bounds = [part.bound for part in self.parts if part.bound is not None]
        return sum(bounds) if len(bounds) == len(self.parts) else None

    def spec(self) -> str:
        return "&".join(part.spec() for part in self.parts)

    def __add__(self, other: Magnitude | Sum) -> Sum:
        return Sum(self.parts + other.parts) if isinstance(other, Magnitude | Sum) else NotImplemented


def every(claims: Iterable[bool | None]) -> bool | None:
    """`all` for True, False and None: None if some are unknown and the others true."""
    known = list(claims)
    return False if False in known else None if None in known else True


def _times(scale: Value, value: Tensor) -> Tensor:
    """scale * value, without a pass over the value if the scale is fixed at 1, the default."""
    return value if isinstance(scale, float) and scale == 1 else scale * value


def _over(n: Tensor, radius: Value) -> Tensor:
    """n / radius; a product if radii are learned per channel, which saves three passes in the backward pass."""
    traced = torch._C._get_tracing_state() is not None
    if not isinstance(radius, Tensor) or radius.numel() < 2 or not radius.requires_grad or traced:
        return n / radius
    # Divide by the largest radius first: the derivative of 1 / radius would overflow for tiny radii.
    largest = radius.detach().max()
    return n / largest * (radius / largest).reciprocal()


# Limits of sliders.
ALPHA, BETA, RHO = (0.1, 2.0), (0.0, 2.0), (0.1, 3.0)

registry: Registry[type[Magnitude]] = Registry("a magnitude", identifiers=True)
register = registry.register


@device_function
def _sphere(n: Block, scale: Block, fast: constexpr) -> Block:
    return scale + 0 * n, 0 * n, 1 + 0 * n


@register
@dataclass(frozen=True)
class Sphere(Magnitude):
    """h(n) = alpha: only the angle matters. Eq. 4."""

    name: ClassVar[str] = "sphere"
    device: ClassVar[Any] = staticmethod(_sphere)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale}"
    javascript: ClassVar[str] = "scale"
    saturates: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha", positive=True, limits=ALPHA)

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return scale * torch.ones_like(n)

    def slopes(self, smallest: Tensor, scale: Tensor) -> MagnitudeSlopes:
        return MagnitudeSlopes(scale / smallest, torch.zeros_like(scale), scale, True)


@device_function
def _ball(n: Block, scale: Block, radius: Block, fast: constexpr) -> Block:
    inverse = 1 / radius
    reached = n * inverse
    slope = tl.where(reached <= 1, scale * inverse, 0.0)
    return scale * at_most(reached, 1.0), slope, at_most(reached, 1.0), -slope * reached


@register
@dataclass(frozen=True)
class Ball(Magnitude):
    """h(n) = alpha * min(n, rho) / rho. Eq. 5."""

    name: ClassVar[str] = "ball"
    device: ClassVar[Any] = staticmethod(_ball)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale} min({n}, {radius}) / {radius}"
    javascript: ClassVar[str] = "scale * Math.min(n, radius) / radius"
    saturates: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    scale: Constant = constant(1.0, "alpha", positive=True, limits=ALPHA)
    radius: RadiusLike = constant(Radius(), "rho", positive=True, limits=RHO)

    def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
        return _times(scale, clamp.at_most(_over(n, radius), 1.0))

    def slopes(self, smallest: Tensor, scale: Tensor, radius: Tensor) -> MagnitudeSlopes:
        return MagnitudeSlopes(scale / radius, scale / radius, scale, True)

    def linear_slope(self, scale: Value, radius: Value) -> Value:
        return scale / radius


@device_function
def _tanh(n: Block, scale: Block, radius: Block, fast: constexpr) -> Block:
    inverse = 1 / radius
    reached = n * inverse
    t = tanh(reached, fast)
    slope = (1 - t * t) * (scale * inverse)
    return scale * t, slope, t, -slope * reached


@register
@dataclass(frozen=True)
class Tanh(Magnitude):
    """h(n) = alpha * tanh(n / rho): a smooth ball. Eq. 6."""

    name: ClassVar[str] = "tanh"
    device: ClassVar[Any] = staticmethod(_tanh)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale} tanh({n} / {radius})"
    javascript: ClassVar[str] = "scale * Math.tanh(n / radius)"
    saturates: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha", positive=True, limits=ALPHA)
    radius: RadiusLike = constant(Radius(), "rho", positive=True, limits=RHO)

    def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
        is_fast = n.dtype == torch.float32 and is_eager_on_cpu(n)
        return _times(scale, (FastTanh.apply if is_fast else torch.tanh)(_over(n, radius)))

    def slopes(self, smallest: Tensor, scale: Tensor, radius: Tensor) -> MagnitudeSlopes:
        return MagnitudeSlopes(scale / radius, scale / radius, scale, True)

    def linear_slope(self, scale: Value, radius: Value) -> Value:
        return scale / radius


@device_function
def _linear(n: Block, scale: Block, fast: constexpr) -> Block:
    return scale * n, scale + 0 * n, n


@register
@dataclass(frozen=True)
class Linear(Magnitude):
    """h(n) = alpha * n. Eq. 7."""

    name: ClassVar[str] = "linear"
    device: ClassVar[Any] = staticmethod(_linear)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale} {n}"
    javascript: ClassVar[str] = "scale * n"
    proportional: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha", limits=ALPHA)

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return _times(scale, n)

    def slopes(self, smallest: Tensor, scale: Tensor) -> MagnitudeSlopes:
        return MagnitudeSlopes(scale.abs(), scale.abs(), torch.full_like(scale, math.inf), bool((scale >= 0).all()))


@device_function
def _segmented(n: Block, scale: Block, slope: Block, radius: Block, fast: constexpr) -> Block:
    near = at_most(n, radius)
    inside = n < radius
    value = slope * n + (scale - slope) * near
    return value, tl.where(inside, scale, slope), near, n - near, tl.where(inside, 0.0, scale - slope)


@register
@dataclass(frozen=True)
class Segmented(Magnitude):
    """h(n) = alpha * n up to rho, with slope beta beyond. Eq. 8."""

    name: ClassVar[str] = "seg"
    device: ClassVar[Any] = staticmethod(_segmented)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "({slope} {n} + ({scale} - {slope}) min({n}, {radius}))"
    javascript: ClassVar[str] = "slope * n + (scale - slope) * Math.min(n, radius)"
    smooth: ClassVar[bool] = False
    scale: Constant = constant(1.0, "alpha", limits=ALPHA)
    slope: Constant = constant(0.5, "beta", limits=BETA)
    radius: RadiusLike = constant(Radius(), "rho", positive=True, limits=RHO)

    def value(self, n: Tensor, scale: Value, slope: Value, radius: Value) -> Tensor:
        return slope * n + (scale - slope) * _at_most(n, radius)

    def slopes(self, smallest: Tensor, scale: Tensor, slope: Tensor, radius: Tensor) -> MagnitudeSlopes:
        steepest = torch.maximum(scale.abs(), slope.abs())
        top = torch.where(slope == 0, scale.abs() * radius, math.inf)
        return MagnitudeSlopes(steepest, steepest, top, bool(((slope >= 0) & (scale >= slope)).all()))

    def linear_slope(self, scale: Value, slope: Value, radius: Value) -> Value:
        return scale

    @property
    def bounded(self) -> bool:
        return self.fixed("slope") == 0

    @property
    def bound(self) -> float | None:
        scale, radius = self.fixed("scale"), self.fixed("radius")
        return None if not self.bounded or scale is None or radius is None else abs(scale) * radius


def _at_most(n: Tensor, limit: Value) -> Tensor:
    return torch.minimum(n, limit) if isinstance(limit, Tensor) else clamp.at_most(n, limit)


@device_function
def _log(n: Block, scale: Block, fast: constexpr) -> Block:
    log = log1p(n)
    return scale * log, scale / (1 + n), log


@register
@dataclass(frozen=True)
class Log(Magnitude):
    """h(n) = alpha * log(1 + n). Eq. 9."""

    name: ClassVar[str] = "log"
    device: ClassVar[Any] = staticmethod(_log)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale} log(1 + {n})"
    javascript: ClassVar[str] = "scale * Math.log1p(n)"
    scale: Constant = constant(1.0, "alpha", limits=ALPHA)

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return _times(scale, torch.log1p(n))

    def slopes(self, smallest: Tensor, scale: Tensor) -> MagnitudeSlopes:
        return MagnitudeSlopes(scale.abs(), scale.abs(), torch.full_like(scale, math.inf), bool((scale >= 0).all()))


@device_function
def _mix(n: Block, scale: Block, log_scale: Block, fast: constexpr) -> Block:
    log = log1p(n)
    return scale * n + log_scale * log, scale + log_scale / (1 + n), n, log


@register
@dataclass(frozen=True)
class Mix(Magnitude):
    """h(n) = alpha * n + beta * log(1 + n). Eq. 10."""

    name: ClassVar[str] = "mix"
    device: ClassVar[Any] = staticmethod(_mix)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "({scale} {n} + {log_scale} log(1 + {n}))"
    javascript: ClassVar[str] = "scale * n + log_scale * Math.log1p(n)"
    scale: Constant = constant(1.0, "alpha", limits=ALPHA)
    log_scale: Constant = constant(1.0, "beta", limits=BETA)

    def value(self, n: Tensor, scale: Value, log_scale: Value) -> Tensor:
        return _times(scale, n) + _times(log_scale, torch.log1p(n))

    def slopes(self, smallest: Tensor, scale: Tensor, log_scale: Tensor) -> MagnitudeSlopes:
        return Linear().slopes(smallest, scale) + Log().slopes(smallest, log_scale)


@device_function
def _sharp(n: Block, offset: Block, exponent: Block, fast: constexpr) -> Block:
    whole = n + offset
    value = power(n / whole, exponent)
    # Not value * exponent * offset / (n * whole), which Triton 3.6 cannot compile if h is the same for all channels.
    slope = power(n / whole, exponent - 1) * exponent * offset / (whole * whole)
    return value, slope, -value * exponent / whole


@register
@dataclass(frozen=True)
class Sharp(Magnitude):
    """h(n) = (n / (n + q))^p: the factor of sharpened cosine similarity, which suppresses patches of small norm."""

    name: ClassVar[str] = "sharp"
    device: ClassVar[Any] = staticmethod(_sharp)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "({n} / ({n} + {offset}))^{power:g}"
    javascript: ClassVar[str] = "Math.pow(n / (n + offset), {power})"
    saturates: ClassVar[bool] = True
    offset: Constant = constant(0.1, "q", positive=True, limits=(0.05, 1.0))
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("power of sharp", self.power, above=0)

    def value(self, n: Tensor, offset: Value) -> Tensor:
        return (n / (n + offset)).pow(self.power)

    def slopes(self, smallest: Tensor, offset: Tensor) -> MagnitudeSlopes:
        """Each slope is largest at one norm, or at the smallest norm if that is larger."""
        p = self.power
        at = torch.maximum((p - 1) * offset, smallest)
        chord = (at / (at + offset)).pow(p) / at
        at = torch.maximum((p - 1) / 2 * offset, smallest)
        slope = p * offset * at.pow(p - 1) / (at + offset).pow(p + 1)
        return MagnitudeSlopes(chord, slope, torch.ones_like(offset), p <= 1)

    def fixed_numbers(self) -> tuple[float, ...]:
        return (self.power,)


@dataclass(frozen=True)
class Custom(Magnitude):
    """h is a user's function, from a tensor of norms to a tensor of the same shape."""

    name: ClassVar[str] = "custom"
    equation: ClassVar[str] = "h({n})"
    saturates: ClassVar[bool | None] = None
    smooth: ClassVar[bool | None] = None
    function: Callable[[Tensor], Tensor]

    def value(self, n: Tensor) -> Tensor:
        return self.function(n)

    @property
    def bound(self) -> float | None:
        return None

    def spec(self) -> str:
        return f"<{getattr(self.function, '__name__', 'function').strip('<>')}>"
