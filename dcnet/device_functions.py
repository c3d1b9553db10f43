"""Device functions: equations of magnitudes and angles in Triton, with their derivatives.

A device function computes one element. Its last argument, `fast`, is true in half precision, where hardware
approximations are accurate enough. Without Triton, all device functions are None.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = [
    "AVAILABLE",
    "INTERPRETED",
    "Block",
    "arcsine",
    "at_least",
    "at_most",
    "constexpr",
    "device_function",
    "log",
    "log1p",
    "power",
    "reciprocal",
    "sine",
    "tanh",
    "tl",
    "triton",
]

AVAILABLE = triton is not None
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"

# The types of arguments: a tile of numbers, whose shape only Triton knows, and a compile-time constant.
if TYPE_CHECKING:
    Block: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Block, constexpr = (tl.tensor, tl.constexpr) if AVAILABLE else (Any, Any)


def device_function(function: Callable[..., Any]) -> Any:
    """A decorator that compiles a function for use in kernels; None without Triton."""
    return triton.jit(function) if AVAILABLE else None


@device_function
def at_most(x: Block, limit: Block) -> Block:
    """min(x, limit); NaN stays NaN, as in torch."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@device_function
def at_least(x: Block, limit: Block) -> Block:
    """max(x, limit); NaN stays NaN, as in torch."""
    return tl.maximum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@device_function
def tanh(x: Block, fast: constexpr) -> Block:
    if fast:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    # 1 - 2 / (1 + exp 2x) loses digits for small x, where four terms of the series are exact.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (1 + tl.exp(2 * x)))


@device_function
def reciprocal(x: Block, fast: constexpr) -> Block:
    """1 / x."""
    if fast:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        inverse = 1 / x
    return inverse


@device_function
def log(x: Block, fast: constexpr) -> Block:
    if fast:
        binary = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        value = 0.6931471805599453 * binary
    else:
        value = tl.log(x)
    return value


@device_function
def log1p(x: Block) -> Block:
    series = x * (1 - x * (1 / 2 - x * (1 / 3 - x / 4)))
    return tl.where(tl.abs(x) < 0.01, series, tl.log(1 + x))


@device_function
def power(x: Block, exponent: Block) -> Block:
    """x^exponent of a positive x."""
    return tl.exp2(exponent * tl.log2(x))


@device_function
def sine(x: Block) -> Block:
    """sin of an angle between -pi/2 and pi/2."""
    square = x * x
    high = 1 / 362880 - square * (1 / 39916800)
    return x * (1 - square * (1 / 6 - square * (1 / 120 - square * (1 / 5040 - square * high))))


@device_function
def arcsine(x: Block) -> Block:
    """asin(x), accurate to a few units in the last place of float32; rounding may have moved x outside of [-1, 1]."""
    size = at_most(tl.abs(x), 1.0)
    # asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)) maps to the interval on which the polynomial is accurate.
    large = size > 0.5
    square = tl.where(large, 0.5 * (1 - size), size * size)
    root = tl.where(large, tl.sqrt(square), size)
    terms = 4.5470025998e-2 + square * (2.4181311049e-2 + square * 4.2163199048e-2)
    angle = root + root * square * (1.6666752422e-1 + square * (7.4953002686e-2 + square * terms))
    angle = tl.where(large, 1.5707963267948966 - 2 * angle, angle)
    return tl.where(x < 0, -angle, angle)
