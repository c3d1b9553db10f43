"""How narrow classes are and how far apart, by the angles of their features alone."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """Mean angles in degrees, and the angular Fisher score.

    Attributes:
        within: of features to the mean direction of their class.
        between: of these mean directions to all others; on a circle all even arrangements have the same.
        nearest: of these mean directions to the nearest of the others.
        fisher: the sum of 1 - cos to the own class's mean over that of classes to the mean of all: smaller is better.
    """

    within: float
    between: float
    nearest: float
    fisher: float

    def __str__(self) -> str:
        within = f"within a class {self.within:.1f}°"
        return (
            f"{within}, between classes {self.between:.1f}°, to the nearest {self.nearest:.1f}°\n"
            f"angular Fisher score {self.fisher:.3f}"
        )


def spread_of(points: Tensor, labels: Tensor) -> Spread:
    """The spread of features [N, D] with labels [N]; of one class alone there is nothing between, which is NaN."""
    unit = F.normalize(points.double(), dim=1)
    classes = labels.unique()
    means = torch.stack([F.normalize(unit[labels == c].mean(0), dim=0) for c in classes])
    cos = (unit * means[torch.searchsorted(classes, labels)]).sum(1).clamp(-1, 1)
    counts = torch.stack([(labels == c).sum() for c in classes]).double()
    apart = (counts * (1 - means @ F.normalize(unit.mean(0), dim=0))).sum()
    between, nearest = _between(means)
    return Spread(
        within=torch.rad2deg(torch.acos(cos)).mean().item(),
        between=between,
        nearest=nearest,
        fisher=((1 - cos).sum() / apart.clamp(min=1e-12)).item(),
    )


def target_angle(points: Tensor, labels: Tensor, directions: Tensor) -> float:
    """The mean angle in degrees of features [N, D] with labels [N] to the directions [C, D] of their classes."""
    cos = F.cosine_similarity(points.double(), directions.double()[labels], dim=1).clamp(-1, 1)
    return torch.rad2deg(torch.acos(cos)).mean().item()


def _between(means: Tensor) -> tuple[float, float]:
    """The mean angle of directions to all others, and to the nearest of them."""
    count = len(means)
    if count < 2:
        return math.nan, math.nan
    angles = torch.rad2deg(torch.acos((means @ means.T).clamp(-1, 1)))
    others = angles[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return others.mean().item(), others.amin(1).mean().item()
