"""ROC curves of scored pairs, best thresholds and accuracies. Accepted means score >= threshold."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.checks import Numbers, as_tensor, is_number
from dcnet.verification.embeddings import ScoreHistogram


@dataclass(frozen=True)
class TarAtFar:
    """The true accept rate at a false accept rate of at most `far`.

    Args:
        far: the false accept rate.
        tar: the share of genuine pairs accepted; None with too few impostor pairs for the rate.
        threshold: the lowest threshold with at most that rate, or None.
        note: a sentence if `tar` is None, or if it depends on few impostor pairs.
        accepted: the number of impostor pairs accepted; 0 if `tar` is None.
    """

    far: float
    tar: float | None
    threshold: float | None
    note: str = ""
    accepted: int = 0


@dataclass(frozen=True)
class Roc:
    """The number of accepted pairs at every distinct threshold.

    Args:
        thresholds: float64, descending: just above the highest score, then the distinct scores.
        genuine: accepted genuine pairs at each threshold, int64; all of them at the last.
        impostor: accepted impostor pairs at each threshold, int64.
        width: the width of the bins of a histogram of scores; 0 without bins.
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
        """The false accept rate at each threshold, float64, from 0 to 1."""
        return self.impostor.double() / self.impostors

    @property
    def tar(self) -> Tensor:
        """The true accept rate at each threshold, float64, from 0 to 1."""
        return self.genuine.double() / self.genuines

    @property
    def frr(self) -> Tensor:
        """The false reject rate at each threshold, float64, from 1 to 0."""
        return (self.genuines - self.genuine).double() / self.genuines

    def auc(self) -> float:
        """The probability that a genuine pair scores above an impostor pair; equal scores count half."""
        return float(torch.trapezoid(self.tar, self.far))

    def eer(self) -> float:
        """The rate at which false accepts equal false rejects, interpolated linearly between points."""
        far, gap = self.far, self.far - self.frr
        after = int((gap >= 0).nonzero()[0])
        share = -gap[after - 1] / (gap[after] - gap[after - 1])
        return float(far[after - 1] + share * (far[after] - far[after - 1]))

    def lowest(self, far: float) -> int:
        """The index of the lowest threshold with a false accept rate of at most `far`."""
        return int((self.far <= far).sum()) - 1

    def at(self, threshold: float) -> int:
        """The index at which the same pairs are accepted as with this threshold, for one that is no score."""
        return max(int((self.thresholds >= threshold).sum()) - 1, 0)

    def amid(self, at: int) -> float:
        """A threshold in the middle between the scores rejected and accepted at this index.

        It differs from all scores, so that rounding moves no pair across it. At the first index, where nothing is
        accepted, it is just above the highest score, and at the last, where nothing is rejected, the lowest score.
        """
        return _amid(self.thresholds, at, self.width)

    def tar_at_far(self, far: float = 1e-3) -> TarAtFar:
        """The true accept rate at the lowest threshold with at most this false accept rate, if impostors are enough."""
        check_rate("far", far)
        if note := unresolved(far, self.impostors, "impostor pairs"):
            return TarAtFar(far, None, None, note)
        at = self.lowest(far)
        accepted = int(self.impostor[at])
        return TarAtFar(far, float(self.tar[at]), float(self.thresholds[at]), uncertain(far, self.impostors), accepted)


def roc(scores: Numbers, same: Numbers) -> Roc:
    """The ROC curve of pairs; equal scores are one point.

    Args:
        scores: [P], larger for more similar pairs.
        same: whether a pair is genuine, bool or 0 and 1, [P].
    """
    return Roc(*_count_accepted(scores, same))


def roc_of_histogram(histogram: ScoreHistogram) -> Roc:
    """The ROC curve at the lower edges of the bins that are not empty."""
    filled = (histogram.genuine + histogram.impostor).nonzero()[:, 0].flip(0)
    if not len(filled):
        raise ValueError("a curve needs genuine and impostor pairs, but the histogram is empty")
    counts = [part[filled].cumsum(0) for part in (histogram.genuine, histogram.impostor)]
    edges = histogram.edges()
    width = 2 / histogram.bins
    above = float(edges[filled[0]]) + width
    if filled[0] == histogram.bins - 1:
        # The last bin includes its upper edge, the score of two identical images.
        above = math.nextafter(1.0, math.inf)
    return Roc(*_with_start(above, edges[filled], *counts), width)


def _count_accepted(scores: Numbers, same: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds, and the genuine and impostor pairs accepted at each, as in `Roc`; one kind may be missing."""
    scores, same = check_scores(scores, same)
    order = scores.argsort(descending=True)
    scores, same = scores[order], same[order]
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True], device="cpu")]).nonzero()[:, 0]
    genuine, impostor = same.cumsum(0)[last], (~same).cumsum(0)[last]
    return _with_start(math.nextafter(float(scores[0]), math.inf), scores[last], genuine, impostor)


def _with_start(above: float, thresholds: Tensor, genuine: Tensor, impostor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the first point, at which nothing is accepted."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    above_all = torch.tensor([above], dtype=torch.float64, device="cpu")
    return torch.cat([above_all, thresholds]), torch.cat([zero, genuine]), torch.cat([zero, impostor])


def check_scores(scores: Numbers, same: Numbers) -> tuple[Tensor, Tensor]:
    """Scores in float64 and answers in bool, on the CPU."""
    scores, same = in_double(scores), check_answers(same)
    if scores.dim() != 1 or scores.shape != same.shape or not len(scores):
        raise ValueError(f"scores and same must be [P] and not empty, not {list(scores.shape)} and {list(same.shape)}")
    if not torch.isfinite(scores).all():
        at = int((~torch.isfinite(scores)).nonzero()[0])
        raise ValueError(f"scores must be finite, but that of pair {at} is {float(scores[at])}")
    return scores, same


def in_double(scores: Numbers) -> Tensor:
    """Scores in float64 on the CPU."""
    return as_tensor(scores, "scores").detach().cpu().double()


def check_answers(same: Numbers) -> Tensor:
    """Answers in bool on the CPU, from bool or 0 and 1."""
    same = as_tensor(same, "same").detach().cpu()
    if not ((same == 0) | (same == 1)).all():
        raise ValueError(f"same must be True or False for each pair, not {same[(same != 0) & (same != 1)][0].item()}")
    return same.bool()


def _amid(thresholds: Tensor, at: int, width: float = 0.0) -> float:
    """The middle between this threshold and the next lower one; at both ends, the threshold itself."""
    upper = float(thresholds[at])
    if at in (0, len(thresholds) - 1):
        return upper
    lower = float(thresholds[at + 1]) + width
    middle = lower + (upper - lower) / 2
    # Adjacent floats have no number between them.
    return middle if middle > lower else upper


# The smallest error rate; no list of pairs is long enough to measure it.
LEAST_RATE = 1e-12


def check_rate(name: str, rate: float) -> None:
    """Checks an error rate."""
    if not is_number(rate) or not 0 < rate < 1:
        raise ValueError(f"{name} must be above 0 and below 1, not {rate}")
    if rate < LEAST_RATE:
        raise ValueError(f"{name} must be {LEAST_RATE:g} or more, not {rate}")


def unresolved(rate: float, count: int, things: str) -> str:
    """A sentence if there are too few `things` to measure the rate, otherwise an empty string."""
    if 1 / count <= rate:
        return ""
    needed = math.ceil(1 / rate)
    return f"{count:,} {things} are too few for a rate of {rate:g}: one of them is {1 / count:g}; {needed:,} are needed"


# Below this number of expected errors, a measured rate says little: of 10, the 95 % interval is 5 to 18.
FEW_ERRORS = 10


def uncertain(rate: float, count: int) -> str:
    """A sentence if fewer than `FEW_ERRORS` impostor pairs decide the threshold for this rate."""
    if (expected := math.floor(rate * count)) >= FEW_ERRORS:
        return ""
    needed = math.ceil(FEW_ERRORS / rate)
    return (
        f"the threshold for a false accept rate of {rate:g} depends on the {expected + 1} most similar of {count:,} "
        f"impostor pairs; {needed:,} pairs are better"
    )


@dataclass(frozen=True)
class DevelopmentAccuracy:
    """The accuracy on pairs, with the best threshold of a development set."""

    accuracy: float
    threshold: float
    development_accuracy: float


def best_threshold(scores: Numbers, same: Numbers, balanced: bool = False) -> float:
    """The threshold with the best accuracy.

    It is in the middle between two adjacent scores, at the lowest score if all are accepted, or just above the highest
    if none is. Of equally good thresholds it is the highest, which accepts the fewest impostors.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        balanced: weight genuine and impostor pairs equally, whatever their numbers.
    """
    thresholds, genuine, impostor = _count_accepted(scores, same)
    genuines, impostors = int(genuine[-1]), int(impostor[-1])
    _check_balance(genuines, impostors, balanced)
    # In integers, so that ties are exact.
    right = genuine * impostors - impostor * genuines if balanced else genuine - impostor
    return _amid(thresholds, int((right == right.max()).nonzero()[0]))


def accuracy(scores: Numbers, same: Numbers, threshold: float, balanced: bool = False) -> float:
    """The share of pairs that are classified correctly.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        threshold: a pair is accepted if score >= threshold.
        balanced: return the mean of the accuracies on genuine and on impostor pairs.
    """
    scores, same = check_scores(scores, same)
    right = (scores >= threshold) == same
    if not balanced:
        return float(right.double().mean())
    _check_balance(int(same.sum()), int((~same).sum()), balanced)
    return float((right[same].double().mean() + right[~same].double().mean()) / 2)


def development_accuracy(
    development: tuple[Numbers, Numbers], test: tuple[Numbers, Numbers], balanced: bool = False
) -> DevelopmentAccuracy:
    """View 1 of LFW: the best threshold on one set of pairs, applied to another.

    Args:
        development: scores [P] and answers [P] of the pairs for the threshold.
        test: scores [Q] and answers [Q] of the pairs for the accuracy.
        balanced: weight genuine and impostor pairs equally, whatever their numbers.
    """
    threshold = best_threshold(*development, balanced)
    found, known = (accuracy(*part, threshold, balanced) for part in (test, development))
    return DevelopmentAccuracy(found, threshold, known)


def _check_balance(genuines: int, impostors: int, balanced: bool) -> None:
    if balanced and not (genuines and impostors):
        raise ValueError(
            f"balanced accuracy needs pairs of both kinds, not {genuines} genuine and {impostors} impostor pairs"
        )
