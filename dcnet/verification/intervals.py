"""Confidence intervals of rates: exact ones of independent pairs, and a bootstrap over people."""

import math
from collections.abc import Iterator, Sequence

import torch
from scipy.special import betaincinv
from torch import Tensor

from dcnet.checks import Numbers, as_tensor, check_number, check_whole
from dcnet.verification.roc_curve import check_rate, check_scores

LEVEL = 0.95
DRAWS = 400
# With fewer people, draws differ too little: in simulations with 3 and 5 people, the 95 % interval of the false accept
# rate at a fixed threshold held the true rate in 29 and 75 % of the cases.
LEAST_PEOPLE = 8

Interval = tuple[float, float]


def exact_interval(hits: int, count: int, level: float = LEVEL) -> Interval:
    """The interval of Clopper and Pearson for a rate of `hits` in `count` independent trials."""
    check_whole("count", count, 1)
    check_whole("hits", hits, 0, count)
    check_number("level", level, above=0, below=1)
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, count - hits + 1, tail))
    high = 1.0 if hits == count else float(betaincinv(hits + 1, count - hits, 1 - tail))
    return low, high


class PeopleBootstrap:
    """Intervals of rates by drawing people at random, since pairs that share a person are not independent.

    Each draw takes as many people as there are, with replacement. If a person p is drawn c_p times, a genuine pair
    counts c_p times, and an impostor pair c_p c_q times. The interval is the middle part of the rates of all draws.
    With fewer than `LEAST_PEOPLE` people there is none, since it would be too narrow. If no pair or every pair of a
    kind is accepted, the draws agree; the interval then reaches at least as far as the exact one, which takes the pairs
    as independent and is too narrow if they share people.

    Args:
        scores: the scores of the pairs, [P].
        first: the person of the first image of each pair, integers [P].
        second: the person of the second image; equal for a genuine pair.
        draws: the number of draws.
        seed: the same seed gives the same draws.
        level: the confidence level.
    """

    def __init__(
        self,
        scores: Numbers,
        first: Numbers,
        second: Numbers,
        draws: int = DRAWS,
        seed: int = 0,
        level: float = LEVEL,
    ):
        check_whole("draws", draws, 2)
        check_number("level", level, above=0, below=1)
        self.draws, self.seed, self.level = draws, seed, level
        one, other = _people(first), _people(second)
        if one.shape != other.shape:
            raise ValueError(f"pairs need equally many first and second people, not {len(one)} and {len(other)}")
        scores, same = check_scores(scores, one == other)
        people, numbers = torch.stack([one, other]).unique(return_inverse=True)
        self.people = len(people)
        # Descending, for cumulative weights.
        order = scores.argsort(descending=True, stable=True)
        same, numbers = same[order], numbers[:, order]
        self._genuine, self._impostor = scores[order][same], scores[order][~same]
        self._person, self._both = numbers[0, same], numbers[:, ~same]

    def __str__(self) -> str:
        if self.people < LEAST_PEOPLE:
            return f"no intervals: a bootstrap needs {LEAST_PEOPLE} people or more, not {self.people}"
        return f"{100 * self.level:g} % intervals by a bootstrap over {self.people:,} people ({self.draws} draws)"

    def tar_at_far(self, rates: Sequence[float]) -> list[Interval | None]:
        """The intervals of the true accept rate at these false accept rates; each draw has its own threshold."""
        for rate in rates:
            check_rate("far", rate)
        found = [self._true_accepts(genuine, impostor, rates) for genuine, impostor in self._weights()]
        genuine, impostor = (torch.ones_like(scores) for scores in (self._genuine, self._impostor))
        without_draws, count = self._true_accepts(genuine, impostor, rates), len(genuine)
        return [
            None if math.isnan(rate) else self._widened(self._interval(list(draws)), round(rate * count), count)
            for rate, draws in zip(without_draws, zip(*found, strict=True), strict=True)
        ]

    def at_threshold(self, threshold: float) -> tuple[Interval | None, Interval | None]:
        """The intervals of the false accept rate and of the true accept rate at a fixed threshold."""
        accepted = int((self._genuine >= threshold).sum()), int((self._impostor >= threshold).sum())
        found = [
            [float(of[:count].sum() / of.sum()) for of, count in zip(weights, accepted, strict=True)]
            for weights in self._weights()
        ]
        tar, far = (
            self._widened(self._interval([draw[kind] for draw in found]), accepted[kind], len(scores))
            for kind, scores in enumerate((self._genuine, self._impostor))
        )
        return far, tar

    def _weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The weights of genuine and of impostor pairs in each draw, by descending score."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.draws):
            drawn = torch.randint(self.people, (self.people,), generator=generator, device="cpu")
            times = drawn.bincount(minlength=self.people).double()
            # Much faster than an index in brackets.
            yield times[self._person], times.index_select(0, self._both[0]) * times.index_select(0, self._both[1])

    def _true_accepts(self, genuine: Tensor, impostor: Tensor, rates: Sequence[float]) -> list[float]:
        accepted, wrong = genuine.cumsum(0), impostor.cumsum(0)
        if not (len(accepted) and len(wrong) and accepted[-1] > 0 and wrong[-1] > 0):
            return [math.nan] * len(rates)
        wanted = wrong[-1] * torch.tensor(rates, dtype=torch.float64, device="cpu")
        # The first impostor that exceeds the rate; only genuine pairs with higher scores are accepted.
        first = torch.searchsorted(wrong, wanted, right=True)
        counts = torch.searchsorted(-self._genuine, -self._impostor[first])
        return [float(accepted[count - 1] / accepted[-1]) if count else 0.0 for count in counts.tolist()]

    def _interval(self, rates: list[float]) -> Interval | None:
        """The middle part of the rates; None with few people, or if less than half of the draws have both kinds."""
        found = torch.tensor([rate for rate in rates if not math.isnan(rate)], dtype=torch.float64, device="cpu")
        if self.people < LEAST_PEOPLE or len(found) < self.draws / 2:
            return None
        tail = (1 - self.level) / 2
        low, high = (float(found.quantile(share)) for share in (tail, 1 - tail))
        return low, high

    def _widened(self, interval: Interval | None, hits: int, count: int) -> Interval | None:
        """The interval of `hits` of `count` pairs; with none or all of them, at least as wide as the exact one."""
        if interval is None or 0 < hits < count:
            return interval
        low, high = exact_interval(hits, count, self.level)
        return min(low, interval[0]), max(high, interval[1])


def _people(given: Numbers) -> Tensor:
    people = as_tensor(given, "people of pairs").cpu()
    if people.dim() != 1 or people.is_floating_point():
        raise ValueError(f"people of pairs must be integers [P], not {people.dtype} {list(people.shape)}")
    return people.long()
