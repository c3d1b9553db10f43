"""Timing in turns, summaries and means."""

import math

import pytest

from dcnet.bench.meter import geometric_mean, summarize, time_rounds


def test_rounds_rotate_the_order():
    order: list[str] = []

    def stopwatch(name: str):
        return lambda: float(order.append(name) or len(order))

    rounds: list[int] = []
    times = time_rounds({name: stopwatch(name) for name in "abc"}, 1, 3, lambda: rounds.append(len(order)))
    assert "".join(order) == "abcbcacababc"
    assert rounds == [3, 6, 9, 12]
    assert times == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}


def test_rounds_without_stopwatches():
    assert time_rounds({}, 1, 2) == {}


def test_summary_has_medians_and_ratios_of_rounds():
    found = summarize({"conv": [1.0, 2.0, 4.0], "own": [3.0, 3.0, 8.0]}, {"conv": "conv", "own": "conv"})
    assert found["conv"] == {"ms": 2, "ms_quartiles": [1.5, 3], "ratio": 1, "ratio_quartiles": [1, 1]}
    assert found["own"] == {"ms": 3, "ms_quartiles": [3, 5.5], "ratio": 1.5, "ratio_quartiles": [1.75, 2.5]}


def test_geometric_mean():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
    assert geometric_mean([1.0, 2.0, 4.0]) == pytest.approx(2)
    assert geometric_mean([1.0, None]) is None
    assert geometric_mean([]) is None
    assert math.isclose(geometric_mean([1.1]) or 0, 1.1)
