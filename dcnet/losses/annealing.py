"""How a margin is let in: weakly at first, since training from scratch does not survive all of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.learnable import check_number


@dataclass(frozen=True)
class Annealing:
    """SphereFace's schedule: the target's logit is (lambda cos + psi) / (1 + lambda).

    lambda is max(floor, start / (1 + rate * step)), so that the share of the margin psi is 1 / (1 + lambda). A margin
    on the other classes is annealed in the same way. The defaults are SphereFace's.

    Attributes:
        start: lambda at the first step.
        rate: how fast lambda falls.
        floor: the smallest lambda; with 5, a sixth of the margin is used in the end.
    """

    start: float = 1000.0
    rate: float = 0.12
    floor: float = 5.0

    def __post_init__(self) -> None:
        for name in ("start", "rate", "floor"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of an annealing must not be negative, not {getattr(self, name)!r}")

    @property
    def first_weight(self) -> float:
        """The share of psi at the first step."""
        return 1 / (1 + max(self.floor, self.start))

    def weight(self, step: Tensor) -> Tensor:
        """The share of psi at a step, from 0 to 1."""
        easing = torch.clamp(self.start / (1 + self.rate * step.double()), min=self.floor)
        return (1 / (1 + easing)).float()


@dataclass(frozen=True)
class Automatic:
    """The share of the margin grows as the target angle falls, and never decreases.

    A margin of m needs m * theta_y below the angles to other classes, which are near 90 degrees between random
    directions. The wanted share is how far the mean target angle has come from 90 degrees to `ready`; each step moves
    the share by `pace` of the difference.

    Attributes:
        ready: the mean target angle in degrees at which the whole margin is used.
        pace: the part of the remaining difference that one step makes.
        most: the largest share.
    """

    ready: float = 45.0
    pace: float = 0.01
    most: float = 1.0

    def __post_init__(self) -> None:
        for name in ("ready", "pace", "most"):
            check_number(name, getattr(self, name))
        if not 0 < self.ready < 90:
            raise ValueError(f"ready must be an angle between 0 and 90 degrees, not {self.ready!r}")
        for name in ("pace", "most"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)!r}")

    @property
    def first_weight(self) -> float:
        """The share of psi at the first step: none, as the angle is not known yet."""
        return 0.0

    def next_weight(self, weight: Tensor, degrees: Tensor) -> Tensor:
        """The share after a batch whose mean target angle is so many degrees; nobody has to wait for it."""
        allowed = ((90 - degrees) / (90 - self.ready)).clamp(0, 1) * self.most
        # A batch without an angle, empty or not finite, leaves the share what it is, which would stay nan otherwise.
        return weight + self.pace * (allowed - weight).clamp(min=0).nan_to_num(nan=0.0)


Easing = Annealing | Automatic
BY_MARGIN = "by margin"


def let_in(cos: Tensor, asked: Tensor, share: Tensor | float | None) -> Tensor:
    """The cosine with this share of what a margin makes of it; None for all of it.

    A margin that leaves the cosine alone gives it back as it is, and then nothing is computed: there may be a million
    classes.
    """
    if share is None or asked is cos:
        return asked
    # In the place of the difference, for the same reason.
    return (asked - cos).mul_(share).add_(cos)


def as_easing(given: Easing | str | None, eased: bool) -> Easing | None:
    """The annealing that is asked for: "auto", one of the two, None, or what the margin is known to need."""
    if given == BY_MARGIN:
        return Annealing() if eased else None
    if given == "auto":
        return Automatic()
    if given is not None and not isinstance(given, Annealing | Automatic):
        raise ValueError(f"annealing must be an Annealing, 'auto' or None, not {given!r}")
    return given
