"""Times that can be compared: measured in turns, with the spread that they have."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Gives the milliseconds of one call, each time it is called.
Stopwatch = Callable[[], float]


def time_rounds(
    stopwatches: Mapping[str, Stopwatch], warmup: int, repeats: int, after_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Reads every stopwatch once a round, starting with another one each round, so that none has the better moments.

    The rounds of the warmup are not given back.
    """
    names = list(stopwatches)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warmup + repeats):
        first = i % max(len(names), 1)
        for name in [*names[first:], *names[:first]]:
            times[name].append(stopwatches[name]())
        after_round()
    return {name: taken[warmup:] for name, taken in times.items()}


def summarize(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, Any]]:
    """Medians with their quartiles, and the ratio of medians with the quartiles of the ratios of the rounds."""
    quartiles = functools.partial(statistics.quantiles, n=4, method="inclusive")
    results = {}
    for name, taken in times.items():
        low, median, high = quartiles(taken)
        ratio_low, _, ratio_high = quartiles([own / other for own, other in zip(taken, times[base], strict=True)])
        results[name] = {
            "ms": median,
            "ms_quartiles": [low, high],
            "ratio": median / statistics.median(times[base]),
            "ratio_quartiles": [ratio_low, ratio_high],
        }
    return results


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """The mean of ratios, in which twice as fast makes up for twice as slow; None where one of them is not known."""
    known = list(ratios)
    if not known or None in known:
        return None
    return math.exp(statistics.fmean(math.log(ratio) for ratio in known if ratio is not None))
