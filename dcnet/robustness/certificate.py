"""What no attack of a size can do: how far logits move at most, for how many images that is enough, and in words."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Certificate:
    """How far a perturbation of a size can move the difference of two logits, at most.

    Args:
        epsilon: the size.
        norm: that it is measured in.
        lipschitz: how far the difference of logits i and j can move for each 1 of epsilon, float64 [classes, classes].
        spread: how far at all, from any image to any other; inf where nothing bounds it.
        low: no logit is less, whatever the image is; [classes], -inf where there is no bound.
        high: no logit is more.
        images: how many were given.
        accuracy: the share of them that the network is right about.
        certified: the share of them that it is right about, and stays so within epsilon.
        factor: how much smaller the movement would have to be to certify the first of them; None if it is right about
            none. Below 1 some are certified.
        reach: the largest epsilon that some of them is certified against.
    """

    epsilon: float
    norm: str
    lipschitz: Tensor
    spread: Tensor
    low: Tensor
    high: Tensor
    images: int = 0
    accuracy: float | None = None
    certified: float | None = None
    factor: float | None = None
    reach: float | None = None

    @property
    def movement(self) -> Tensor:
        """How far the difference of logits i and j can move within epsilon, [classes, classes]."""
        # Without a change nothing moves, also where the constant is infinite.
        far = self.epsilon * self.lipschitz if self.epsilon else torch.zeros_like(self.lipschitz)
        return torch.minimum(far, self.spread)

    @property
    def bound(self) -> float:
        """How far the difference of any two logits can move within epsilon."""
        return float(self.movement.max())

    @property
    def bounded(self) -> bool:
        """Whether the logits stay in a box however far the image moves."""
        return bool(self.spread.isfinite().all())

    @property
    def excess(self) -> float:
        """How many times as far as they can move at all the Lipschitz constant lets logits move; 0 without a box."""
        far, most = self.epsilon * float(self.lipschitz.max()), float(self.spread.max())
        return far / most if 0 < most < math.inf else 0.0

    @property
    def vacuous(self) -> bool:
        """Whether nothing follows from it: no image is certified, or, without images, logits may move all they can."""
        if self.images:
            return not self.certified
        return self.excess >= 1

    def summary(self) -> dict[str, Any]:
        """The numbers, as a record holds them; None where there is no bound, or no image."""
        return {
            "epsilon": self.epsilon,
            "norm": self.norm,
            "bound": self.bound,
            "lipschitz": float(self.lipschitz.max()),
            "spread": float(self.spread.max()) if self.bounded else None,
            "low": float(self.low.min()) if self.bounded else None,
            "high": float(self.high.max()) if self.bounded else None,
            "images": self.images,
            "accuracy": self.accuracy,
            "certified": self.certified,
            "factor": self.factor,
            "reach": self.reach,
            "vacuous": self.vacuous,
        }

    def __str__(self) -> str:
        """What is certified, or by how much it is not, and where the logits stay, in plain words."""
        what = f"A perturbation of {self.epsilon:.4g} in {self.norm}"
        moved = f"{what} moves the difference of two logits by {self.bound:.3g} at most"
        return f"{moved}: {self._verdict()}. {self._box()}."

    def _verdict(self) -> str:
        if self.images and not self.vacuous:
            return f"{self.certified:.1%} of {self.images} images are certified, of {self.accuracy:.1%} that are right"
        if self.images and self.factor is None:
            return f"vacuous, since the network is right about none of {self.images} images"
        if self.images:
            surest = f"vacuous, since that is {self.factor:.3g} times what the surest of {self.images} images can bear"
            return f"{surest}, and the Lipschitz constant would certify it against {self.reach:.3g} at most"
        if self.vacuous:
            return (
                f"vacuous, since its Lipschitz constant would let them move {self.excess:.3g} times as far as they can"
            )
        return "an image is certified if its margin is larger"

    def _box(self) -> str:
        if not self.bounded:
            return "Nothing bounds the logits of images that are farther away"
        low, high = float(self.low.min()), float(self.high.max())
        return f"However far an image moves, all logits stay between {low:.3g} and {high:.3g}"
