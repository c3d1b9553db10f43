"""Accuracy with a threshold from other pairs than those that are counted: ten folds, or a development split."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.arrays import Numbers, as_tensor
from dcnet.verification.curves import accepted, checked_answers, checked_scores, middle

FOLDS = 10


@dataclass(frozen=True)
class FoldAccuracy:
    """The share of pairs that are told right, for each fold with the threshold of all others."""

    accuracies: tuple[float, ...]
    thresholds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.accuracies) / len(self.accuracies)

    @property
    def standard_error(self) -> float:
        """The standard deviation over the folds, with one degree of freedom less, by the root of their number."""
        count, mean = len(self.accuracies), self.mean
        variance = math.fsum((accuracy - mean) ** 2 for accuracy in self.accuracies) / (count - 1)
        return math.sqrt(variance / count)


@dataclass(frozen=True)
class DevelopmentAccuracy:
    """The share of pairs that are told right, with the threshold that was best for the pairs to develop with."""

    accuracy: float
    threshold: float
    development_accuracy: float


def best_threshold(scores: Numbers, same: Numbers, balanced: bool = False) -> float:
    """The threshold with the best accuracy: a pair is the same where score >= threshold.

    It lies in the middle between two neighbouring scores, at the lowest score where all are accepted, or just above the
    highest where none is. Of thresholds that are equally good it is the highest, which accepts the fewest impostors.

    Args:
        scores: of the pairs, [P].
        same: whether they are the same, [P].
        balanced: counts the same and the different half each, however many there are of them.
    """
    thresholds, genuine, impostor = accepted(scores, same)
    genuines, impostors = int(genuine[-1]), int(impostor[-1])
    _check_balance(genuines, impostors, balanced)
    # In whole numbers, so that what is equally good is equal.
    right = genuine * impostors - impostor * genuines if balanced else genuine - impostor
    return _midway(thresholds, int((right == right.max()).nonzero()[0]))


def accuracy(scores: Numbers, same: Numbers, threshold: float, balanced: bool = False) -> float:
    """The share of pairs that are classified correctly.

    Args:
        scores: of the pairs, [P].
        same: whether they are the same, [P].
        threshold: a pair counts as the same where score >= threshold.
        balanced: the mean of the share among the same and that among the different pairs.
    """
    scores, same = checked_scores(scores, same)
    right = (scores >= threshold) == same
    if not balanced:
        return float(right.double().mean())
    _check_balance(int(same.sum()), int((~same).sum()), balanced)
    return float((right[same].double().mean() + right[~same].double().mean()) / 2)


def fold_accuracy(scores: Numbers, same: Numbers, folds: Numbers, balanced: bool = False) -> FoldAccuracy:
    """The protocol of LFW: for each fold, the threshold that is best on all others, and the accuracy on the fold.

    Args:
        scores: of the pairs, [P].
        same: whether they are the same, [P].
        folds: the number of the fold of each pair, [P].
        balanced: counts the same and the different half each, however many there are of them.
    """
    scores, same = checked_scores(scores, same)
    folds = as_tensor(folds, "folds").cpu()
    if folds.shape != scores.shape:
        raise ValueError(f"folds must be [{len(scores)}], one number for each pair, not {list(folds.shape)}")
    numbers = folds.unique().tolist()
    if len(numbers) < 2:
        raise ValueError(f"a threshold from other folds needs two folds or more, not {len(numbers)}")
    found, thresholds = [], []
    for number in numbers:
        inside = folds == number
        thresholds.append(best_threshold(scores[~inside], same[~inside], balanced))
        found.append(accuracy(scores[inside], same[inside], thresholds[-1], balanced))
    return FoldAccuracy(tuple(found), tuple(thresholds))


def make_folds(same: Numbers, count: int = FOLDS, seed: int = 0) -> Tensor:
    """Random folds, int64 [P], for pairs without any; the same and the different are divided evenly.

    Args:
        same: whether the pairs are the same, [P].
        count: how many folds; with fewer pairs of a kind there are as many folds as pairs of it.
        seed: the same seed gives the same folds.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, since each fold takes its threshold from others, not {count}")
    same = checked_answers(same)
    kinds = [kind.nonzero()[:, 0] for kind in (same, ~same)]
    folds = min(count, *map(len, kinds))
    if folds < 2:
        found = f"{len(kinds[0])} and {len(kinds[1])}"
        raise ValueError(f"folds need two pairs or more of the same and two of different ones, not {found}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.empty(len(same), dtype=torch.int64, device="cpu")
    for places in kinds:
        chosen[places] = torch.randperm(len(places), generator=generator, device="cpu") % folds
    return chosen


def development_accuracy(
    development: tuple[Numbers, Numbers], test: tuple[Numbers, Numbers], balanced: bool = False
) -> DevelopmentAccuracy:
    """View 1 of LFW: the best threshold on one set of pairs, applied to another.

    Args:
        development: scores [P] and answers [P] of the pairs that the threshold is from.
        test: scores [Q] and answers [Q] of the pairs that are counted.
        balanced: counts the same and the different half each, however many there are of them.
    """
    threshold = best_threshold(*development, balanced)
    found, known = (accuracy(*part, threshold, balanced) for part in (test, development))
    return DevelopmentAccuracy(found, threshold, known)


def _midway(thresholds: Tensor, at: int) -> float:
    if at == 0 or at == len(thresholds) - 1:
        return float(thresholds[at])
    return middle(float(thresholds[at + 1]), float(thresholds[at]))


def _check_balance(genuines: int, impostors: int, balanced: bool) -> None:
    if balanced and not (genuines and impostors):
        raise ValueError(
            f"balanced accuracy needs pairs of both kinds, not {genuines} of the same and {impostors} different ones"
        )
