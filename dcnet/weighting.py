"""Weightings: how the filter norm ||w|| enters the magnitude (Section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dcnet.device_functions import Block, device_function, tl  # noqa: F401 - Triton's interpreter needs `tl` here
from dcnet.parameters import Value
from dcnet.registry import Registry


@dataclass(frozen=True)
class Weighting:
    """h(||w||, ||x||) = factor(||w||) * h(argument(||w||, ||x||)).

    `weighted` says that ||w|| matters at all, `keeps_bound` that a bounded magnitude stays bounded, `multiplies` that
    the factor is ||w|| itself, `nonnegative` that the factor is never negative for any h, `divides` that the
    factor is divided by the magnitude's scale, and `uses_magnitude` that the factor needs h(||w||); without it `factor`
    gets None as h.

    `device(||w||, h(||w||), scale)` returns a and b of a * h(b * ||x||), the derivatives of both with respect to
    ||w||, and those of a with respect to h(||w||) and the scale; see `dcnet.device_functions`.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    weighted: ClassVar[bool] = True
    keeps_bound: ClassVar[bool] = True
    multiplies: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = True
    divides: ClassVar[bool] = False
    uses_magnitude: ClassVar[bool] = False
    device: ClassVar[Any] = None

    def factor(self, w_norm: Tensor, h: Tensor | None, scale: Value) -> Value:
        return 1.0

    def argument(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        return x_norm

    def bound(self, bound: float, scale: float) -> float:
        """The bound of the weighted magnitude, from that of the magnitude."""
        return bound


registry: Registry[Weighting] = Registry("a weighting", identifiers=True)


def register(weighting: type[Weighting]) -> type[Weighting]:
    """A class decorator that adds a weighting to the registry by its name."""
    registry.add(weighting.name, weighting())
    return weighting


@device_function
def _unweighted(norm: Block, h: Block, scale: Block) -> Block:
    return 1.0, 1.0, 0.0, 0.0, 0.0, 0.0


@register
class Unweighted(Weighting):
    """h(||x||): the filter norm does not matter."""

    name = "unweighted"
    equation = "{x}"
    device = staticmethod(_unweighted)
    weighted = False


@device_function
def _linearly(norm: Block, h: Block, scale: Block) -> Block:
    return norm, 1.0, 1.0, 0.0, 0.0, 0.0


@register
class LinearlyWeighted(Weighting):
    """||w|| h(||x||)."""

    name = "linear"
    equation = "||w|| {x}"
    device = staticmethod(_linearly)
    keeps_bound = False
    multiplies = True

    def factor(self, w_norm: Tensor, h: Tensor | None, scale: Value) -> Value:
        return w_norm


@device_function
def _jointly(norm: Block, h: Block, scale: Block) -> Block:
    return 1.0, norm, 0.0, 1.0, 0.0, 0.0


@register
class Joint(Weighting):
    """h(||w|| ||x||). Eq. 15."""

    name = "joint"
    equation = "{both}"
    device = staticmethod(_jointly)

    def argument(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        return w_norm * x_norm


@device_function
def _product(norm: Block, h: Block, scale: Block) -> Block:
    return h / scale, 1.0, 0.0, 0.0, 1 / scale, -h / (scale * scale)


@register
class Product(Weighting):
    """h(||w||) h(||x||) / alpha, so that alpha enters once. Eq. 16."""

    name = "product"
    equation = "{w} {x} / {scale}"
    device = staticmethod(_product)
    nonnegative = False
    divides = True
    uses_magnitude = True

    def factor(self, w_norm: Tensor, h: Tensor | None, scale: Value) -> Value:
        assert h is not None
        return h / scale

    def bound(self, bound: float, scale: float) -> float:
        return bound * bound / abs(scale)
