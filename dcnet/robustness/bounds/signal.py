"""What is known of the values between two layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """How far values can move, for a perturbation of the image of size 1, and between which they lie for any image.

    Args:
        shape: of one image's values: channels and sides, or features.
        linf: how far a value of each channel can move, [channels].
        low: no value of a channel is less, [channels]; -inf where there is no bound.
        high: no value of a channel is more.
        stretched: how far all values together can move, in L2, once each channel is multiplied by a number of these,
            [channels]: a scale belongs to the filters it follows, and not to all of them the largest.
        differences: how far the difference of any two values can move, and how far at all for any two images, both
            [features, features]; None if only the values themselves are known.
    """

    shape: tuple[int, ...]
    linf: Tensor
    low: Tensor
    high: Tensor
    stretched: Callable[[Tensor], float]
    differences: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def places(self) -> int:
        """How many values a channel has."""
        return math.prod(self.shape[1:])

    @cached_property
    def l2(self) -> float:
        """How far all values together can move, in L2."""
        from_each = math.sqrt(self.places * float(self.linf.square().sum()))
        return min(self.stretched(torch.ones_like(self.linf)), from_each)

    @cached_property
    def moved(self) -> Tensor:
        """How far a value of each channel can move: no farther than all of them together."""
        return self.linf.clamp(max=self.l2)

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    @property
    def bounded(self) -> bool:
        return bool(self.width.isfinite().all())

    def scaled(self, scale: Tensor, shift: Tensor | float = 0.0) -> "Signal":
        """The values times a number a channel, plus another."""
        ends = torch.stack((scale * self.low, scale * self.high)).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        low, high = ends.amin(0) + shift, ends.amax(0) + shift
        return Signal(
            self.shape, self.linf * scale.abs(), low, high, lambda further: self.stretched(scale.abs() * further.abs())
        )

    def pair_bounds(self) -> tuple[Tensor, Tensor]:
        """How far the difference of two values can move, and how far at all for any two images; [features] twice."""
        moved, width = self.moved, self.width
        lipschitz = (moved[:, None] + moved[None, :]).clamp(max=math.sqrt(2) * self.l2)
        spread = width[:, None] + width[None, :]
        if self.differences is not None:
            closer = self.differences()
            lipschitz, spread = torch.minimum(lipschitz, closer[0]), torch.minimum(spread, closer[1])
        return _no_less(lipschitz).fill_diagonal_(0), spread.fill_diagonal_(0)


def _no_less(bounds: Tensor) -> Tensor:
    """Where constants are beyond all numbers, as the product of very many layers, there is no bound, and not NaN."""
    return bounds.nan_to_num(nan=math.inf, posinf=math.inf)


def together(l2: float) -> Callable[[Tensor], float]:
    """`stretched` of values of which no more is known than how far they move together."""
    return lambda scale: l2 * float(scale.abs().max())


def first_signal(shape: Sequence[int], norm: str, device: torch.device) -> Signal:
    """An image of any values that is moved by 1 in the norm."""
    ones = torch.ones(shape[0], dtype=torch.float64, device=device)
    l2 = 1.0 if norm == "l2" else math.sqrt(math.prod(shape))
    unknown = torch.full_like(ones, math.inf)
    return Signal(tuple(shape), ones, -unknown, unknown, together(l2))
