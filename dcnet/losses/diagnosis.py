"""What a margin asks, and how far the features are from giving it, in numbers and in words."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.losses.annealing import let_in
from dcnet.losses.margin import Margin

BINS = 18


@dataclass(frozen=True)
class Diagnosis:
    """Angles in degrees, between features and the weights of their class.

    `histogram` counts target angles in steps of ten degrees; `effective_m` is the multiple of the target angle that the
    margin, as far as it is let in, asks for at the median angle; `inside` is the share of samples that are classified
    rightly by angle, and not any more with the margin; `right` that of those that are right by angle.
    """

    mean_angle: float
    median_angle: float
    histogram: tuple[int, ...]
    nearest_other: float
    effective_m: float
    used: float
    right: float
    inside: float

    def __str__(self) -> str:
        lines = [
            f"Features are at {self.mean_angle:.1f} degrees from the weights of their class in the mean (median "
            f"{self.median_angle:.1f}), and the nearest other class is at {self.nearest_other:.1f}.",
            f"{self.right:.1%} are nearest to their own class, and {self.inside:.1%} are so but inside the margin.",
            f"{self.used:.1%} of the margin is used: at the median angle it counts as {self.effective_m:.2f} times it.",
        ]
        return " ".join([*lines, self.advice])

    @property
    def advice(self) -> str:
        if self.median_angle > 80:
            return "Features do not point to their class yet: train longer before more of the margin is let in."
        if self.right - self.inside > 0.99:
            return "The margin is met by nearly all of them: a larger one may be tried."
        return "The margin has something to do."


@torch.no_grad()
def diagnose(cos: Tensor, labels: Tensor, margin: Margin, used: float) -> Diagnosis:
    """Of the cosines [N, classes] of features with all classes, with so much of the margin used."""
    _check(cos)
    cos = cos.double().clamp(-1, 1)
    own = cos.gather(1, labels[:, None]).squeeze(1)
    nearest = cos.scatter(1, labels[:, None], -math.inf).amax(1)
    eased = let_in(own, margin.target(own), used)
    hardest = let_in(nearest, margin.others(nearest), used)
    degrees = torch.rad2deg(torch.acos(own))
    median = degrees.median()
    return Diagnosis(
        mean_angle=degrees.mean().item(),
        median_angle=median.item(),
        histogram=tuple(int(count) for count in torch.histc(degrees.float(), BINS, 0, 180)),
        nearest_other=torch.rad2deg(torch.acos(nearest)).mean().item(),
        effective_m=_effective_multiple(margin, used, torch.deg2rad(median)),
        used=used,
        right=(own > nearest).double().mean().item(),
        inside=((own > nearest) & (eased <= hardest)).double().mean().item(),
    )


def _check(cos: Tensor) -> None:
    if not len(cos):
        raise ValueError("an empty batch has no angles to diagnose: give the features of one sample at least")
    finite = cos.isfinite().all(1)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise ValueError(
            f"sample {first} has no angles, since its features or weights of the head are not finite: give finite ones"
        )


def _effective_multiple(margin: Margin, used: float, theta: Tensor) -> float:
    """How many times theta the angle is, whose cosine the annealed margin gives; beyond pi psi counts on."""
    cos = torch.cos(theta)
    eased = let_in(cos, margin.target(cos), used).item()
    # psi falls from 1 to 1 - 2m: below -1 each 2 is another pi.
    turns = max(math.ceil((-1 - eased) / 2), 0)
    folded = min(max(eased + 2 * turns, -1.0), 1.0)
    angle = turns * math.pi + math.acos(folded)
    return angle / max(theta.item(), 1e-6)
