"""Diagnosis of a margin head: the angles of features, and the effect of the margin at these angles."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.losses.annealing import apply_share
from dcnet.losses.margins import Margin

BINS = 18


@dataclass(frozen=True)
class Diagnosis:
    """Angles in degrees between features and the weights of their class.

    Attributes:
        mean_angle: mean target angle.
        median_angle: median target angle.
        histogram: counts of target angles in steps of ten degrees.
        nearest_other: mean angle to the nearest other class.
        effective_m: the multiple of the target angle that the margin, at its current share, requires at the median.
        used: the share of the margin in use.
        right: the fraction of samples that are classified correctly by angle.
        inside: the fraction of samples that are correct by angle, but not with the margin.
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
            f"Mean angle to the weights of the own class: {self.mean_angle:.1f} degrees (median "
            f"{self.median_angle:.1f}); to the nearest other class: {self.nearest_other:.1f}.",
            f"{self.right:.1%} are nearest to their own class; {self.inside:.1%} are, but inside the margin.",
            f"{self.used:.1%} of the margin is used: it multiplies the median angle by {self.effective_m:.2f}.",
        ]
        return " ".join([*lines, self.advice])

    @property
    def advice(self) -> str:
        if self.median_angle > 80:
            return "Features do not point to their class yet: train longer before using more of the margin."
        if self.right - self.inside > 0.99:
            return "Nearly all samples satisfy the margin: try a larger one."
        return "The margin is effective."


@torch.no_grad()
def diagnose(cos: Tensor, labels: Tensor, margin: Margin, used: float) -> Diagnosis:
    """The diagnosis for the cosines [N, classes] of features with all classes; `used` is the share of the margin."""
    _check(cos)
    cos = cos.double().clamp(-1, 1)
    own = cos.gather(1, labels[:, None]).squeeze(1)
    nearest = cos.scatter(1, labels[:, None], -math.inf).amax(1)
    target = apply_share(own, margin.target(own), used)
    hardest = apply_share(nearest, margin.others(nearest), used)
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
        inside=((own > nearest) & (target <= hardest)).double().mean().item(),
    )


def _check(cos: Tensor) -> None:
    if not len(cos):
        raise ValueError("an empty batch has no angles to diagnose: give the features of one sample at least")
    finite = cos.isfinite().all(1)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise ValueError(
            f"sample {first} has no angles: its features or the weights of the head are not finite; give finite ones"
        )


def _effective_multiple(margin: Margin, used: float, theta: Tensor) -> float:
    """The angle whose cosine is the annealed margin, divided by theta; psi continues below -1 for angles beyond pi."""
    cos = torch.cos(theta)
    target = apply_share(cos, margin.target(cos), used).item()
    # psi decreases from 1 to 1 - 2m: below -1, each further decrease by 2 is another pi of angle.
    turns = max(math.ceil((-1 - target) / 2), 0)
    cosine = min(max(target + 2 * turns, -1.0), 1.0)
    angle = turns * math.pi + math.acos(cosine)
    return angle / max(theta.item(), 1e-6)
