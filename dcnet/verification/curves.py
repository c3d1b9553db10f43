"""How often the same are accepted and others are, at every threshold: a pair is accepted where score >= threshold."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.arrays import Numbers, as_tensor
from dcnet.verification.scores import ScoreHistogram


@dataclass(frozen=True)
class TarAtFar:
    """The share of genuine pairs that are accepted where at most `far` of the impostor pairs are.

    Args:
        far: the rate that was asked for.
        tar: the share; None where there are too few impostor pairs to tell.
        threshold: the lowest one that holds the rate; None where there is none to tell.
        note: why there is none, in a sentence.
    """

    far: float
    tar: float | None
    threshold: float | None
    note: str = ""


@dataclass(frozen=True)
class Roc:
    """The pairs that are accepted at every threshold that makes a difference.

    Args:
        thresholds: float64, falling; the first lies just above the highest score, the others are the distinct scores.
        genuine: int64, the genuine pairs that are accepted at each; all of them at the last.
        impostor: int64, the impostor pairs that are.
        width: of the bins that scores were counted in, within which they may lie above a threshold; 0 without bins.
    """

    thresholds: Tensor
    genuine: Tensor
    impostor: Tensor
    width: float = 0.0

    def __post_init__(self) -> None:
        for kind, count in (("genuine", self.genuines), ("impostor", self.impostors)):
            if count == 0:
                raise ValueError(f"a curve needs genuine and impostor pairs, but there is no {kind} pair")

    @property
    def genuines(self) -> int:
        return int(self.genuine[-1])

    @property
    def impostors(self) -> int:
        return int(self.impostor[-1])

    @property
    def far(self) -> Tensor:
        """The share of impostor pairs that are accepted, float64, rising from 0 to 1."""
        return self.impostor.double() / self.impostors

    @property
    def tar(self) -> Tensor:
        """The share of genuine pairs that are accepted, float64, rising from 0 to 1."""
        return self.genuine.double() / self.genuines

    @property
    def frr(self) -> Tensor:
        """The share of genuine pairs that are refused, float64, falling from 1 to 0."""
        return (self.genuines - self.genuine).double() / self.genuines

    def auc(self) -> float:
        """The probability that a genuine pair scores above an impostor pair; equal scores count half."""
        return float(torch.trapezoid(self.tar, self.far))

    def eer(self) -> float:
        """The rate at which as many impostor pairs are accepted as genuine ones refused, between points on a line."""
        far, gap = self.far, self.far - self.frr
        after = int((gap >= 0).nonzero()[0])
        share = -gap[after - 1] / (gap[after] - gap[after - 1])
        return float(far[after - 1] + share * (far[after] - far[after - 1]))

    def lowest(self, far: float) -> int:
        """The place of the lowest threshold at which at most `far` of the impostor pairs are accepted."""
        return int((self.far <= far).sum()) - 1

    def amid(self, at: int, above: float | None = None) -> float:
        """A threshold that parts what is refused at this place from what is accepted, in the middle of the gap.

        It is no pair's own score, so that rounding, as that of other batches, does not move a pair across it. At the
        first place, where nothing is accepted, it is just above the highest score, and at the last, where nothing is
        refused, the lowest one. `above` is another upper end of the gap.
        """
        upper = float(self.thresholds[at]) if above is None else above
        if at in (0, len(self.thresholds) - 1):
            return upper
        return middle(float(self.thresholds[at + 1]) + self.width, upper)

    def tar_at_far(self, far: float = 1e-3) -> TarAtFar:
        """The share at the lowest threshold that holds the rate; nothing where one impostor would be more than it."""
        check_rate("far", far)
        if note := unresolved(far, self.impostors, "impostor pairs"):
            return TarAtFar(far, None, None, note)
        at = self.lowest(far)
        return TarAtFar(far, float(self.tar[at]), float(self.thresholds[at]))


def roc(scores: Numbers, same: Numbers) -> Roc:
    """The ROC curve of pairs; equal scores are one point.

    Args:
        scores: [P], larger for pairs that are more alike.
        same: bool [P], or 0 and 1: whether the two images of a pair show the same.
    """
    return Roc(*accepted(scores, same))


def roc_of_histogram(histogram: ScoreHistogram) -> Roc:
    """The curve at the lower ends of the bins that are not empty: scores are told apart as far as bins do."""
    filled = (histogram.genuine + histogram.impostor).nonzero()[:, 0].flip(0)
    if not len(filled):
        raise ValueError("a curve needs genuine and impostor pairs, but the histogram is empty")
    counts = [part[filled].cumsum(0) for part in (histogram.genuine, histogram.impostor)]
    edges = histogram.edges()
    width = 2 / histogram.bins
    above = float(edges[filled[0]]) + width
    if filled[0] == histogram.bins - 1:
        # A score of 1 is in the last bin although it is at its upper end, as of an image that is there twice.
        above = math.nextafter(1.0, math.inf)
    return Roc(*_from_none(above, edges[filled], *counts), width)


def accepted(scores: Numbers, same: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds, and the genuine and impostor pairs that are accepted at each, as in `Roc`; one kind may be absent."""
    scores, same = checked_scores(scores, same)
    order = scores.argsort(descending=True)
    scores, same = scores[order], same[order]
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True], device="cpu")]).nonzero()[:, 0]
    genuine, impostor = same.cumsum(0)[last], (~same).cumsum(0)[last]
    return _from_none(math.nextafter(float(scores[0]), math.inf), scores[last], genuine, impostor)


def _from_none(above: float, thresholds: Tensor, genuine: Tensor, impostor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the point before, at which nothing is accepted."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    above_all = torch.tensor([above], dtype=torch.float64, device="cpu")
    return torch.cat([above_all, thresholds]), torch.cat([zero, genuine]), torch.cat([zero, impostor])


def checked_scores(scores: Numbers, same: Numbers) -> tuple[Tensor, Tensor]:
    """Scores as float64 and answers as bool, on the CPU; what is no score of a pair is an error."""
    scores = in_double(scores)
    same = as_tensor(same, "same").detach().cpu()
    if scores.dim() != 1 or scores.shape != same.shape or not len(scores):
        raise ValueError(f"scores and same must be [P] and not empty, not {list(scores.shape)} and {list(same.shape)}")
    if not torch.isfinite(scores).all():
        at = int((~torch.isfinite(scores)).nonzero()[0])
        raise ValueError(f"scores must be finite, but that of pair {at} is {float(scores[at])}")
    return scores, checked_answers(same)


def in_double(scores: Numbers) -> Tensor:
    """Scores as float64 on the CPU; those of a list not by way of float32, in which its numbers would be others."""
    return as_tensor(scores, "scores").detach().cpu().double()


def checked_answers(same: Numbers) -> Tensor:
    """Answers as bool, on the CPU, of which 0 and 1 are two."""
    same = as_tensor(same, "same").detach().cpu()
    if not ((same == 0) | (same == 1)).all():
        raise ValueError(f"same must be True or False for each pair, not {same[(same != 0) & (same != 1)][0].item()}")
    return same.bool()


def middle(below: float, above: float) -> float:
    """The middle of two numbers, or the upper one where none lies between them: a threshold that parts the two."""
    found = below + (above - below) / 2
    return found if found > below else above


def check_rate(name: str, rate: float) -> None:
    """Refuses what is no rate of errors that one could ask for."""
    if not 0 < rate < 1:
        raise ValueError(f"{name} must be above 0 and below 1, not {rate}")


def unresolved(rate: float, count: int, things: str) -> str:
    """A sentence where one of so few things would already be more than the rate; nothing otherwise."""
    if 1 / count <= rate:
        return ""
    needed = math.ceil(1 / rate)
    return f"{count:,} {things} are too few for a rate of {rate:g}: one of them is {1 / count:g}; {needed:,} are needed"
