"""Folds of pairs: of a list, random, or such that they share no person; accuracies with thresholds of other folds."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.checks import Numbers, as_tensor, check_whole
from dcnet.data.batches import make_generator
from dcnet.verification.pairs import Pairs
from dcnet.verification.roc_curve import accuracy, best_threshold, check_answers, check_scores

FOLDS = 10
# Pairs of people of two folds.
NO_FOLD = -1


def make_folds(same: Numbers, count: int = FOLDS, seed: int = 0) -> Tensor:
    """Random folds, int64 [P], with genuine and impostor pairs divided evenly.

    Args:
        same: whether the pairs are genuine, [P].
        count: the number of folds, at most the number of pairs of either kind.
        seed: the same seed gives the same folds.
    """
    check_whole("count", count, 2)
    same = check_answers(same)
    kinds = [kind.nonzero()[:, 0] for kind in (same, ~same)]
    folds = min(count, *map(len, kinds))
    if folds < 2:
        found = f"{len(kinds[0])} and {len(kinds[1])}"
        raise ValueError(f"folds need two pairs or more of each kind, not {found} (same and different)")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.empty(len(same), dtype=torch.int64, device="cpu")
    for places in kinds:
        chosen[places] = torch.randperm(len(places), generator=generator, device="cpu") % folds
    return chosen


def people_folds(first: Numbers, second: Numbers, count: int = FOLDS, seed: int = 0) -> Tensor:
    """Folds of pairs that share no person, int64 [P]; -1 for a pair of people of two folds.

    People are divided at random, such that each fold has a similar number of people and of genuine pairs.

    Args:
        first: the person of the first image of each pair, integers [P].
        second: the person of the second image; equal for a genuine pair.
        count: the number of folds.
        seed: the same seed gives the same folds.
    """
    check_whole("count", count, 2)
    both = torch.stack([as_tensor(part, "people of pairs").cpu() for part in (first, second)])
    people, both = both.unique(return_inverse=True)
    if len(people) < 2 * count:
        raise ValueError(f"{count} folds need {2 * count} people or more, two in each fold, not {len(people)}")
    genuine = both[0, both[0] == both[1]].bincount(minlength=len(people))
    shuffled = torch.randperm(len(people), generator=make_generator(seed, 3), device="cpu")
    order = shuffled[genuine[shuffled].argsort(descending=True, stable=True)]
    # 0, 1, ..., 9, 9, ..., 1, 0, 0, 1, ...: the folds take turns, in the reverse order each second time.
    turn = torch.arange(len(people), device="cpu") % (2 * count)
    fold = torch.empty_like(order)
    fold[order] = torch.minimum(turn, 2 * count - 1 - turn)
    return torch.where(fold[both[0]] == fold[both[1]], fold[both[0]], NO_FOLD)


def fold_masks(folds: Numbers, count: int) -> list[Tensor]:
    """Which of `count` pairs are in each fold, bool [P], from the number of the fold of each pair."""
    folds = as_tensor(folds, "folds").cpu()
    if folds.shape != (count,):
        raise ValueError(f"folds must be [{count}], one number per pair, not {list(folds.shape)}")
    masks = [folds == number for number in folds.unique()]
    if len(masks) < 2:
        raise ValueError(f"a threshold from other folds needs two folds or more, not {len(masks)}")
    return masks


@dataclass(frozen=True)
class FoldAccuracy:
    """The accuracy on each fold, with the best threshold of all other folds."""

    accuracies: tuple[float, ...]
    thresholds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.accuracies) / len(self.accuracies)

    @property
    def standard_error(self) -> float:
        """The sample standard deviation over the folds, divided by the root of their number."""
        count, mean = len(self.accuracies), self.mean
        variance = math.fsum((accuracy - mean) ** 2 for accuracy in self.accuracies) / (count - 1)
        return math.sqrt(variance / count)


def fold_accuracy(scores: Numbers, same: Numbers, folds: Numbers, balanced: bool = False) -> FoldAccuracy:
    """The protocol of LFW: the accuracy on each fold with the best threshold of the other folds.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        folds: the number of the fold of each pair, [P].
        balanced: weight genuine and impostor pairs equally, whatever their numbers.
    """
    scores, same = check_scores(scores, same)
    found, thresholds = [], []
    for inside in fold_masks(folds, len(scores)):
        thresholds.append(best_threshold(scores[~inside], same[~inside], balanced))
        found.append(accuracy(scores[inside], same[inside], thresholds[-1], balanced))
    return FoldAccuracy(tuple(found), tuple(thresholds))


# The numbers of folds to try, as long as each fold has both kinds of pairs.
COUNTS = (10, 5, 3, 2)


@dataclass(frozen=True)
class Folds:
    """The fold of each pair, int64 [P], and a note if the folds are not from the list."""

    numbers: Tensor
    note: str = ""

    @classmethod
    def of(cls, pairs: Pairs) -> "Folds":
        """The folds of the list if each has pairs of both kinds, as balanced accuracy requires; otherwise random."""
        if pairs.folds is None:
            return cls(make_folds(pairs.same), "the folds are random, since the list has none")
        kinds = [pairs.same[pairs.folds == fold] for fold in pairs.folds.unique()]
        if len(kinds) == 1:
            why = "all pairs are in one fold of the list"
        elif not all(kind.any() and not kind.all() for kind in kinds):
            why = "a fold of the list has only one kind of pairs"
        else:
            return cls(pairs.folds)
        return cls(make_folds(pairs.same), f"the folds are random, since {why}")

    @classmethod
    def by_people(cls, pairs: Pairs, people: Tensor | None) -> "Folds":
        """The folds of the list, or folds that share no person; random ones without enough people.

        Args:
            pairs: the pairs.
            people: the person of each image, integers [N]; None if unknown.
        """
        if people is None:
            return cls.of(pairs)
        both = people[pairs.first], people[pairs.second]
        if pairs.folds is not None and not (listed := cls.of(pairs)).note:
            shared = _in_two_folds(torch.cat(both), pairs.folds.repeat(2))
            return cls(listed.numbers, f"people who are in two folds of the list or more: {shared:,}" if shared else "")
        for count in (count for count in COUNTS if len(torch.cat(both).unique()) >= 2 * count):
            numbers = people_folds(*both, count)
            kinds = [pairs.same[numbers == fold] for fold in range(count)]
            if all(kind.any() and not kind.all() for kind in kinds):
                return cls(numbers, _across_note(int((numbers == NO_FOLD).sum())))
        return cls(cls.of(pairs).numbers, "the folds are random and share people, since there are too few people")


def _in_two_folds(people: Tensor, folds: Tensor) -> int:
    """The number of people with pairs in two folds or more."""
    pairs = torch.stack([people, folds]).unique(dim=1)
    return int((pairs[0].unique(return_counts=True)[1] > 1).sum())


def _across_note(across: int) -> str:
    if not across:
        return ""
    return f"no person is in two folds; the {across:,} pairs of people of two folds count only for AUC, EER and TAR@FAR"
