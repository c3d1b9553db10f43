"""Angles g: functions of the angle between filter and patch, with values in [-1, 1] (Section 3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet import clamp
from dcnet.checks import check_number, check_whole
from dcnet.component import Component, constant
from dcnet.device_functions import (
    Block,
    arcsine,
    at_least,
    at_most,
    constexpr,
    device_function,
    log,
    power,
    sine,
    tanh,
    tl,
)
from dcnet.parameters import Constant, Slot, Value
from dcnet.registry import Registry


@dataclass(frozen=True)
class AngleSlopes:
    """Bounds on an angle function g(c) for all c = cos(theta) in [-1, 1]; every one has g(0) = 0 and |g| <= 1.

    Args:
        slope: upper bound of |dg/dc|, or of |dg/dtheta| if `by_angle`; [out], or a scalar for all filters.
        by_angle: whether `slope` bounds |dg/dtheta|, since dg/dc has no bound.
        rises: whether 0 <= g(c) / c <= g'(c), so that g / c never falls as |c| grows.
        homogeneous: whether g(a c) = a g(c) for a >= 0, so that g(c) is c or max(c, 0).
        nonnegative: whether g is never below 0.
    """

    slope: Tensor
    by_angle: bool = False
    rises: bool = False
    homogeneous: bool = False
    nonnegative: bool = False


def _float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Angle(Component):
    """g(theta), written as a function of cos(theta).

    `homogeneous` says that g(a c) = a g(c) for every a >= 0, so that a layer applies g to the inner product and never
    forms the cosine; `identity` that g is the cosine itself; `bounded` that |g| <= 1; `smooth` that g is differentiable
    everywhere in (0, pi). None means unknown.

    `device(c, *constants, *fixed, fast)` returns g and its derivatives with respect to c and the constants;
    `device_inverse` takes g and returns c and the same derivatives, so that c need not be stored. Where g is constant,
    it may return any c. `slopes` is optional: only robustness certificates need it.
    """

    device_inverse: ClassVar[Any] = None

    homogeneous: ClassVar[bool] = False
    identity: ClassVar[bool] = False
    bounded: ClassVar[bool | None] = True
    smooth: ClassVar[bool | None] = True

    def slopes(self, *args: Any, **constants: Any) -> AngleSlopes:
        """Bounds on g, given the constants in float64."""
        raise NotImplementedError(f"{type(self).__name__} does not define slopes(**constants)")


registry: Registry[type[Angle]] = Registry("an angle", identifiers=True)
register = registry.register


class _SafeAsin(torch.autograd.Function):
    """asin, exact on [-1, 1], whose slope 1 / sqrt(1 - c^2) stops growing where 1 - c^2 falls below delta."""

    generate_vmap_rule = True

    @staticmethod
    def forward(cos: Tensor, delta: float) -> Tensor:
        return torch.asin(cos.clamp(-1, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        cos, ctx.delta = inputs
        ctx.save_for_backward(cos)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos,) = ctx.saved_tensors
        return grad * torch.rsqrt((1 - cos * cos).clamp(min=ctx.delta)), None


def safe_asin(cos: Tensor, delta: float) -> Tensor:
    """asin(cos) = pi/2 - theta, exact, with slope 1 / sqrt(max(1 - cos^2, delta))."""
    # torch.jit cannot save a trace that contains a Python function.
    return _SafeAsin.forward(cos, delta) if clamp.is_traced() else _SafeAsin.apply(cos, delta)


@device_function
def _arc_slope(cos: Block, delta: Block) -> Block:
    return tl.rsqrt(at_least(1 - cos * cos, delta))


@device_function
def _linear(cos: Block, delta: Block, fast: constexpr) -> Block:
    return 0.6366197723675814 * arcsine(cos), 0.6366197723675814 * _arc_slope(cos, delta)


@device_function
def _linear_inverse(g: Block, delta: Block, fast: constexpr) -> Block:
    cos = sine(1.5707963267948966 * at_most(at_least(g, -1.0), 1.0))
    return cos, 0.6366197723675814 * _arc_slope(cos, delta)


@register
@dataclass(frozen=True)
class Linear(Angle):
    """g = 1 - 2 theta / pi. Eq. 11."""

    name: ClassVar[str] = "linear"
    device: ClassVar[Any] = staticmethod(_linear)
    device_inverse: ClassVar[Any] = staticmethod(_linear_inverse)
    equation: ClassVar[str] = "(1 - 2 theta / pi)"
    javascript: ClassVar[str] = "1 - 2 * theta / Math.PI"
    delta: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta of linear", self.delta, above=0)

    def fixed_numbers(self) -> tuple[float, ...]:
        return (self.delta,)

    def value(self, cos: Tensor) -> Tensor:
        return 2 / math.pi * safe_asin(cos, self.delta)

    def slopes(self) -> AngleSlopes:
        return AngleSlopes(_float64(2 / math.pi), by_angle=True)


@device_function
def _cosine(cos: Block, fast: constexpr) -> Block:
    return cos, 1.0


@register
@dataclass(frozen=True)
class Cosine(Angle):
    """g = cos(theta). Eq. 12."""

    name: ClassVar[str] = "cos"
    device: ClassVar[Any] = staticmethod(_cosine)
    device_inverse: ClassVar[Any] = staticmethod(_cosine)
    equation: ClassVar[str] = "cos(theta)"
    javascript: ClassVar[str] = "Math.cos(theta)"
    homogeneous: ClassVar[bool] = True
    identity: ClassVar[bool] = True

    def value(self, cos: Tensor) -> Tensor:
        return cos

    def slopes(self) -> AngleSlopes:
        return AngleSlopes(_float64(1), rises=True, homogeneous=True)


@device_function
def _sigmoid_slopes(t: Block, arc: Block, cos: Block, inverse: Block, delta: Block, top: Block) -> Block:
    """The derivatives of top * t, with t = tanh(arc / 2k) and top = coth(pi / 4k), with respect to cos and k."""
    rise = (0.5 * top * inverse) * (1 - t * t)
    by_top = (top * top - 1) * (0.7853981633974483 * inverse * inverse)
    return rise * _arc_slope(cos, delta), by_top * t - rise * arc * inverse


@device_function
def _sigmoid(cos: Block, k: Block, delta: Block, fast: constexpr) -> Block:
    inverse, arc = 1 / k, arcsine(cos)
    # Not 0.785... * inverse, which Triton 3.6 cannot compile if k is learned.
    top = 1 / tanh(0.7853981633974483 / k, False)
    t = tanh(arc * (0.5 * inverse), fast)
    slopes = _sigmoid_slopes(t, arc, cos, inverse, delta, top)
    return top * t, slopes[0], slopes[1]


@device_function
def _sigmoid_inverse(g: Block, k: Block, delta: Block, fast: constexpr) -> Block:
    inverse = 1 / k
    end = tanh(0.7853981633974483 / k, False)
    # For small k, g rounds to 1 long before the angle does; its slope is close to zero there.
    t = tl.clamp(g * end, -0.9999999, 0.9999999)
    arc = tl.clamp(k * (log(1 + t, fast) - log(1 - t, fast)), -1.5707963267948966, 1.5707963267948966)
    cos = sine(arc)
    slopes = _sigmoid_slopes(t, arc, cos, inverse, delta, 1 / end)
    return cos, slopes[0], slopes[1]


@register
@dataclass(frozen=True)
class Sigmoid(Angle):
    """g = coth(pi / 4k) * tanh((pi/2 - theta) / 2k), which is Eq. 13 in a form that cannot overflow."""

    name: ClassVar[str] = "sigmoid"
    device: ClassVar[Any] = staticmethod(_sigmoid)
    device_inverse: ClassVar[Any] = staticmethod(_sigmoid_inverse)
    equation: ClassVar[str] = "coth(pi / 4{k}) tanh((pi/2 - theta) / 2{k})"
    javascript: ClassVar[str] = "Math.tanh((Math.PI / 2 - theta) / (2 * k)) / Math.tanh(Math.PI / (4 * k))"
    k: Constant = constant(0.3, "k", positive=True, limits=(0.05, 1.5))
    delta: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta of sigmoid", self.delta, above=0)

    def fixed_numbers(self) -> tuple[float, ...]:
        return (self.delta,)

    def value(self, cos: Tensor, k: Value) -> Tensor:
        return torch.tanh(safe_asin(cos, self.delta) / (2 * k)) / _tanh(math.pi / (4 * k))

    def slopes(self, k: float | Tensor) -> AngleSlopes:
        steep = torch.as_tensor(k, dtype=torch.float64)
        return AngleSlopes(1 / (2 * steep * torch.tanh(math.pi / (4 * steep))), by_angle=True)


def _tanh(value: Value) -> Value:
    return torch.tanh(value) if isinstance(value, Tensor) else math.tanh(value)


@device_function
def _square(cos: Block, fast: constexpr) -> Block:
    return cos * tl.abs(cos), 2 * tl.abs(cos)


@device_function
def _square_inverse(g: Block, fast: constexpr) -> Block:
    size = tl.sqrt(tl.abs(g))
    return tl.where(g < 0, -size, size), 2 * size


@register
@dataclass(frozen=True)
class SquareCosine(Angle):
    """g = sign(cos theta) * cos(theta)^2. Eq. 14."""

    name: ClassVar[str] = "sqcos"
    device: ClassVar[Any] = staticmethod(_square)
    device_inverse: ClassVar[Any] = staticmethod(_square_inverse)
    equation: ClassVar[str] = "sign(cos(theta)) cos(theta)^2"
    javascript: ClassVar[str] = "Math.sign(Math.cos(theta)) * Math.cos(theta) ** 2"

    def value(self, cos: Tensor) -> Tensor:
        return cos * cos.abs()

    def slopes(self) -> AngleSlopes:
        return AngleSlopes(_float64(2), rises=True)


@device_function
def _relu(cos: Block, fast: constexpr) -> Block:
    return at_least(cos, 0.0), tl.where(cos > 0, 1.0, 0.0)


@register
@dataclass(frozen=True)
class ReluCosine(Angle):
    """g = max(0, cos theta): convolution and ReLU as one operator. Section 5."""

    name: ClassVar[str] = "relucos"
    device: ClassVar[Any] = staticmethod(_relu)
    device_inverse: ClassVar[Any] = staticmethod(_relu)
    equation: ClassVar[str] = "max(0, cos(theta))"
    javascript: ClassVar[str] = "Math.max(0, Math.cos(theta))"
    homogeneous: ClassVar[bool] = True
    smooth: ClassVar[bool] = False

    def value(self, cos: Tensor) -> Tensor:
        return cos.relu()

    def slopes(self) -> AngleSlopes:
        return AngleSlopes(_float64(1), rises=True, homogeneous=True, nonnegative=True)


@device_function
def _power(cos: Block, p: Block, fast: constexpr) -> Block:
    slope = power(at_most(at_least(tl.abs(cos), 1e-12), 1.0), p - 1)
    return cos * slope, p * slope


@device_function
def _power_inverse(g: Block, p: Block, fast: constexpr) -> Block:
    size = power(at_most(at_least(tl.abs(g), 1e-30), 1.0), 1 / p)
    return tl.where(g < 0, -size, size), p * power(tl.maximum(size, 1e-12), p - 1)


@register
@dataclass(frozen=True)
class Power(Angle):
    """g = sign(cos theta) * |cos theta|^p with p >= 1; cos has p = 1 and sqcos p = 2."""

    name: ClassVar[str] = "power"
    device: ClassVar[Any] = staticmethod(_power)
    device_inverse: ClassVar[Any] = staticmethod(_power_inverse)
    equation: ClassVar[str] = "sign(cos(theta)) |cos(theta)|^{p:g}"
    javascript: ClassVar[str] = "Math.sign(Math.cos(theta)) * Math.abs(Math.cos(theta)) ** {p}"
    p: float = 2.0

    # |cos| is clamped to [smallest, 1]: for p < 2 the slope of |cos|^(p - 1) is infinite at zero, and the rounding
    # error of a cosine above 1 would be multiplied by p.
    smallest: ClassVar[float] = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("p of power", self.p, least=1)

    def fixed_numbers(self) -> tuple[float, ...]:
        return (self.p,)

    def value(self, cos: Tensor) -> Tensor:
        return cos * clamp.between(cos.abs(), self.smallest, 1.0).pow(self.p - 1)

    def slopes(self) -> AngleSlopes:
        return AngleSlopes(_float64(self.p), rises=True)


@register
@dataclass(frozen=True)
class Spline(Angle):
    """g(0) = 0, and g has a learned slope, which is positive at each knot and linear in cos between knots.

    It is the "one single function g" of Section 5, which is both angular activation and nonlinearity: it starts as
    cos, and a side whose slopes go to zero acts like ReLU. The larger of |g(-1)| and |g(1)| is 1.
    """

    name: ClassVar[str] = "spline"
    equation: ClassVar[str] = "spline(cos(theta))"
    segments: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("segments of spline", self.segments, least=2)
        if self.segments % 2:
            raise ValueError(f"segments of spline must be even, not {self.segments!r}")

    def slots(self) -> dict[str, Slot]:
        return {"slopes": Slot(1.0, learned=True, positive=True, size=self.segments + 1)}

    def value(self, cos: Tensor, slopes: Tensor) -> Tensor:
        half = self.segments // 2
        right, left = slopes[half:], slopes[: half + 1].flip(0)
        curve = _area(cos * half, right) - _area(-cos * half, left)
        return curve / torch.maximum(_whole_area(right), _whole_area(left))

    def slopes(self, slopes: Tensor) -> AngleSlopes:
        """Bounds on g; its slope is linear between knots, so it is largest at a knot."""
        half = self.segments // 2
        areas = [_whole_area(side) for side in (slopes[half:], slopes[: half + 1])]
        return AngleSlopes(half * slopes.max() / torch.maximum(*areas))


def _area(reached: Tensor, slopes: Tensor) -> Tensor:
    """The integral from 0 to `reached` of the slope, which is linear between the knots 0, 1, 2, ..."""
    zero, one, last = reached.new_zeros(()), reached.new_ones(()), len(slopes) - 2
    area = torch.zeros_like(reached)
    for i in range(last + 1):
        # At an inner knot, maximum and minimum give each adjacent segment half of the gradient; the end gets all of it.
        t = torch.maximum(reached - i, zero)
        t = clamp.at_most(t, 1.0) if i == last else torch.minimum(t, one)
        area = area + t * (slopes[i] + (slopes[i + 1] - slopes[i]) / 2 * t)
    return area


def _whole_area(slopes: Tensor) -> Tensor:
    return (slopes[:-1] + slopes[1:]).sum() / 2


@dataclass(frozen=True)
class Custom(Angle):
    """g is a user's function, from a tensor of cosines in [-1, 1] to a tensor of the same shape."""

    name: ClassVar[str] = "custom"
    equation: ClassVar[str] = "g(theta)"
    bounded: ClassVar[bool | None] = None
    smooth: ClassVar[bool | None] = None
    function: Callable[[Tensor], Tensor]

    def value(self, cos: Tensor) -> Tensor:
        return self.function(clamp.between(cos, -1.0, 1.0))

    def spec(self) -> str:
        return f"<{getattr(self.function, '__name__', 'function').strip('<>')}>"
