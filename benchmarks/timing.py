"""Times that can be compared: measured in turns, with the spread that they have."""

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any


def time_rounds(calls: Mapping[str, Callable[[], float]], warmup: int, repeats: int) -> dict[str, list[float]]:
    """Times every call once a round, starting with another one each round, so that none has the better moments.

    A call gives the milliseconds that it took; the rounds of the warmup are not given back.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warmup + repeats):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            times[name].append(calls[name]())
    return {name: taken[warmup:] for name, taken in times.items()}


def summarize(times: Mapping[str, list[float]], base: str) -> dict[str, Any]:
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


def time_cells(result: Mapping[str, Any]) -> tuple[str, str]:
    """Time and ratio of one result, for a table."""
    ms = "{:.1f} ({:.1f} to {:.1f})".format(result["ms"], *result["ms_quartiles"])
    return ms, "{:.2f} ({:.2f} to {:.2f})".format(result["ratio"], *result["ratio_quartiles"])
