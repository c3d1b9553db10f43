"""h: how the norm of a patch becomes the size of the answer (Sections 3.2.2 and 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet import limits
from dcnet.device import Block, at_most, constexpr, device_function, log1p, power, tanh, tl
from dcnet.learnable import Constant, check_number
from dcnet.part import Part, Value, constant, registrar
from dcnet.radius import Radius, RadiusLike


@dataclass(frozen=True)
class Magnitude(Part):
    """h(n) of a norm n > 0.

    `saturates` says that h never exceeds its scale, or 1 where it has none, `proportional` that h(n) = scale * n, so
    that a layer need not form the norm, `positive` that h > 0 if all its constants are, and `smooth` that h is
    differentiable everywhere. None stands for unknown.

    `device(n, *constants, *fixed, fast)` gives h, its derivative by n, and those by the constants; see `dcnet.device`.
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
        """Whether h may be zero, so that the angle cannot be told from h * g."""
        slots = self.slots().values()
        return not self.positive or any(not slot.positive and (slot.learned or slot.init <= 0) for slot in slots)

    @property
    def bound(self) -> float | None:
        """The largest value of h, where it is finite and the same in every layer."""
        if not self.saturates:
            return None
        return self.fixed("scale") if "scale" in self.slots() else 1.0

    @property
    def parts(self) -> tuple[Magnitude, ...]:
        return (self,)

    def fixed(self, name: str) -> float | None:
        """A constant's value, if it is neither learned nor relative."""
        slot = self.slots()[name]
        return None if slot.learned or slot.relative else slot.init

    def __add__(self, other: Magnitude | Sum) -> Sum:
        return Sum(self.parts + other.parts) if isinstance(other, Magnitude | Sum) else NotImplemented


@dataclass(frozen=True)
class Sum:
    """h(n) = h_1(n) + h_2(n) + ..., each part with constants of its own (Eq. 10 for any parts)."""

    parts: tuple[Magnitude, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a sum of magnitudes needs one part at least, and has none")

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
    """`all` with a third answer, None for unknown."""
    known = list(claims)
    return False if False in known else None if None in known else True


def _times(scale: Value, value: Tensor) -> Tensor:
    """The product, without a pass over the value where the scale is a fixed 1, which is the default."""
    return value if isinstance(scale, float) and scale == 1 else scale * value


def _over(n: Tensor, radius: Value) -> Tensor:
    """The quotient, by a product where radii of channels learn: the gradient of a quotient takes three passes more."""
    if not isinstance(radius, Tensor) or radius.numel() < 2 or not limits.passes_gradient(radius):
        return n / radius
    # By the largest first: the square of the reciprocal of a tiny one, which is its slope, would not be finite.
    largest = radius.detach().max()
    return n / largest * (radius / largest).reciprocal()


registry: dict[str, type[Magnitude]] = {}
register = registrar(registry, "a magnitude")


@device_function
def _sphere(n: Block, scale: Block, fast: constexpr) -> Block:
    return scale + 0 * n, 0 * n, 1 + 0 * n


@register
@dataclass(frozen=True)
class Sphere(Magnitude):
    """h(n) = alpha: only the angle counts. Eq. 4."""

    name: ClassVar[str] = "sphere"
    device: ClassVar[Any] = staticmethod(_sphere)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "{scale}"
    saturates: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha", positive=True)

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return scale * torch.ones_like(n)


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
    saturates: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    scale: Constant = constant(1.0, "alpha", positive=True)
    radius: RadiusLike = constant(Radius(), "rho", positive=True)

    def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
        return _times(scale, limits.at_most(_over(n, radius), 1.0))


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
    saturates: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha", positive=True)
    radius: RadiusLike = constant(Radius(), "rho", positive=True)

    def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
        return _times(scale, torch.tanh(_over(n, radius)))


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
    proportional: ClassVar[bool] = True
    scale: Constant = constant(1.0, "alpha")

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return _times(scale, n)


@device_function
def _segmented(n: Block, scale: Block, slope: Block, radius: Block, fast: constexpr) -> Block:
    near = at_most(n, radius)
    inside = n < radius
    value = slope * n + (scale - slope) * near
    return value, tl.where(inside, scale, slope), near, n - near, tl.where(inside, 0.0, scale - slope)


@register
@dataclass(frozen=True)
class Segmented(Magnitude):
    """h(n) = alpha * n up to rho, and from there on with slope beta. Eq. 8."""

    name: ClassVar[str] = "seg"
    device: ClassVar[Any] = staticmethod(_segmented)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "({slope} {n} + ({scale} - {slope}) min({n}, {radius}))"
    smooth: ClassVar[bool] = False
    scale: Constant = constant(1.0, "alpha")
    slope: Constant = constant(0.5, "beta")
    radius: RadiusLike = constant(Radius(), "rho", positive=True)

    def value(self, n: Tensor, scale: Value, slope: Value, radius: Value) -> Tensor:
        return slope * n + (scale - slope) * _at_most(n, radius)

    @property
    def bounded(self) -> bool:
        return self.fixed("slope") == 0

    @property
    def bound(self) -> float | None:
        scale, radius = self.fixed("scale"), self.fixed("radius")
        return None if not self.bounded or scale is None or radius is None else abs(scale) * radius


def _at_most(n: Tensor, limit: Value) -> Tensor:
    return torch.minimum(n, limit) if isinstance(limit, Tensor) else limits.at_most(n, limit)


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
    scale: Constant = constant(1.0, "alpha")

    def value(self, n: Tensor, scale: Value) -> Tensor:
        return _times(scale, torch.log1p(n))


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
    scale: Constant = constant(1.0, "alpha")
    log_scale: Constant = constant(1.0, "beta")

    def value(self, n: Tensor, scale: Value, log_scale: Value) -> Tensor:
        return _times(scale, n) + _times(log_scale, torch.log1p(n))


@device_function
def _sharp(n: Block, offset: Block, exponent: Block, fast: constexpr) -> Block:
    whole = n + offset
    value = power(n / whole, exponent)
    return value, value * exponent * offset / (n * whole), -value * exponent / whole


@register
@dataclass(frozen=True)
class Sharp(Magnitude):
    """h(n) = (n / (n + q))^p: what sharpened cosine similarity leaves of a norm, so that faint patches fade out."""

    name: ClassVar[str] = "sharp"
    device: ClassVar[Any] = staticmethod(_sharp)
    positive: ClassVar[bool] = True
    equation: ClassVar[str] = "({n} / ({n} + {offset}))^{power:g}"
    saturates: ClassVar[bool] = True
    offset: Constant = constant(0.1, "q", positive=True)
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("power of sharp", self.power, above=0)

    def value(self, n: Tensor, offset: Value) -> Tensor:
        return (n / (n + offset)).pow(self.power)

    def fixed_numbers(self) -> tuple[float, ...]:
        return (self.power,)


@dataclass(frozen=True)
class Own(Magnitude):
    """h is a function of the user's, from a tensor of norms to a tensor of the same shape."""

    name: ClassVar[str] = "own"
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
