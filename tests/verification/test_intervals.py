"""Intervals of rates: against scipy, and the bootstrap over people against plain loops that repeat pairs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from dcnet.verification import PeopleBootstrap, exact_interval

RATES = (0.5, 0.3, 0.1)


@given(st.integers(1, 300), st.data(), st.sampled_from([0.8, 0.95]))
def test_exact_interval_matches_scipy(count, data, level):
    hits = data.draw(st.integers(0, count))
    wanted = binomtest(hits, count).proportion_ci(level, method="exact")
    assert exact_interval(hits, count, level) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def some_pairs(seed, count=60, people=9):
    """Scores with many ties, and the people of both images."""
    generator = np.random.default_rng(seed)
    first, second = generator.integers(0, people, (2, count))
    second = np.where(generator.random(count) < 0.4, first, second)
    return generator.integers(-5, 6, count) / 5 + 0.4 * (first == second), first, second


def draws_of(first, second, draws, seed):
    """How often each person is drawn, as in the bootstrap."""
    people = sorted({*first.tolist(), *second.tolist()})
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        drawn = torch.randint(len(people), (len(people),), generator=generator).tolist()
        yield {person: drawn.count(number) for number, person in enumerate(people)}


def repeated(scores, first, second, times):
    """The scores of genuine and of impostor pairs, each as often as its people were drawn."""
    genuine, impostor = [], []
    for score, one, other in zip(scores.tolist(), first.tolist(), second.tolist(), strict=True):
        if one == other:
            genuine += [score] * times[one]
        else:
            impostor += [score] * (times[one] * times[other])
    return genuine, impostor


def tar_by_loops(genuine, impostor, rate):
    """The most genuine pairs accepted by any threshold with at most this rate of accepted impostor pairs."""
    thresholds = [*genuine, *impostor, math.inf]
    allowed = [t for t in thresholds if sum(score >= t for score in impostor) <= rate * len(impostor)]
    return max(sum(score >= t for score in genuine) / len(genuine) for t in allowed)


@pytest.mark.parametrize("seed", range(4))
def test_bootstrap_matches_pairs_repeated_in_loops(seed):
    scores, first, second = some_pairs(seed)
    found = PeopleBootstrap(scores, first, second, draws=30, seed=seed, level=0.8)
    both = [repeated(scores, first, second, times) for times in draws_of(first, second, 30, seed)]
    for rate, interval in zip(RATES, found.tar_at_far(RATES), strict=True):
        wanted = [tar_by_loops(*kinds, rate) for kinds in both if all(kinds)]
        assert interval == pytest.approx(np.quantile(wanted, [0.1, 0.9]))
    for at, kind in zip(found.at_threshold(0.4), (1, 0), strict=True):
        wanted = [np.mean(np.array(kinds[kind]) >= 0.4) for kinds in both if kinds[kind]]
        assert at == pytest.approx(np.quantile(wanted, [0.1, 0.9]))


def test_interval_is_wider_than_that_of_independent_pairs_if_people_differ():
    """Half of the people have only accepted pairs, the others none: 20 people decide, not 2,000 pairs."""
    person = np.repeat(np.arange(20), 100)
    strangers = np.stack([np.arange(20), np.roll(np.arange(20), 1)])
    scores = np.concatenate([np.where(person % 2, 1.0, -1.0), np.zeros(20)])
    people = np.concatenate([person, strangers[0]]), np.concatenate([person, strangers[1]])
    ((low, high),) = PeopleBootstrap(scores, *people).tar_at_far([0.01])
    exact = exact_interval(1000, 2000)
    assert low < 0.35 < exact[0] < exact[1] < 0.65 < high


def test_no_interval_without_both_kinds_of_pairs():
    found = PeopleBootstrap([0.9, 0.1] * 4, range(8), range(8))
    assert found.tar_at_far([0.1, 0.2]) == [None, None]
    far, tar = found.at_threshold(0.0)
    assert (far, tar) == (None, exact_interval(8, 8))


def test_no_interval_of_few_people():
    """Two people, each drawn once whenever there is an impostor pair at all: the interval would have no width."""
    for people in (2, 3, 7):
        first, second = np.array([(a, b) for a in range(people) for b in range(people) for _ in range(3)]).T
        found = PeopleBootstrap(np.random.default_rng(0).random(len(first)), first, second)
        assert found.tar_at_far([0.5]) == [None]
        assert found.at_threshold(0.5) == (None, None)
        assert str(found) == f"no intervals: a bootstrap needs 8 people or more, not {people}"


def pairs_of_ten_people():
    """Ten people with two genuine pairs each; all pairs of different people once."""
    first, second = np.array(
        [(a, b) for a in range(10) for b in range(10) if a <= b for _ in range(2 if a == b else 1)]
    ).T
    return (first == second).astype(float), first, second


def test_without_errors_the_intervals_reach_as_far_as_the_exact_ones():
    """All draws have the same rate, but an interval of no width would claim certainty."""
    scores, first, second = pairs_of_ten_people()
    found = PeopleBootstrap(scores, first, second, draws=20, level=0.9)
    assert found.at_threshold(0.5) == (exact_interval(0, 45, 0.9), exact_interval(20, 20, 0.9))
    assert found.at_threshold(2.0) == (exact_interval(0, 45, 0.9), exact_interval(0, 20, 0.9))
    assert found.at_threshold(-1.0) == (exact_interval(45, 45, 0.9), exact_interval(20, 20, 0.9))
    assert found.tar_at_far([0.1, 0.3]) == [exact_interval(20, 20, 0.9)] * 2
    reversed_found = PeopleBootstrap(-scores, first, second, draws=20, level=0.9)
    assert reversed_found.tar_at_far([0.1]) == [exact_interval(0, 20, 0.9)]


def test_intervals_with_an_error_are_those_of_the_draws():
    scores, first, second = pairs_of_ten_people()
    scores[-1] = 0.0
    found = PeopleBootstrap(scores, first, second)
    (low, high), (tar,) = found.at_threshold(0.5)[1], found.tar_at_far([0.1])
    assert (low, high) == tar
    assert exact_interval(19, 20)[0] < low < 0.95 < high == 1


def scores_of_people(people, images, generator):
    """Cosines of the pairs of images of people who differ in their spread."""
    centers = np.repeat(generator.normal(size=(people, 8)), images, axis=0)
    spread = np.repeat(generator.uniform(0.3, 1.2, (people, 1)), images, axis=0)
    points = centers + spread * generator.normal(size=centers.shape)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    first, second = np.triu_indices(people * images, 1)
    return (points[first] * points[second]).sum(1), first // images, second // images


@pytest.mark.parametrize("people", [8, 20])
def test_intervals_hold_the_true_rates_in_most_simulations(people):
    generator = np.random.default_rng(0)
    scores, first, second = scores_of_people(400, 3, generator)
    threshold = np.quantile(scores[first != second], 0.9)
    tar = np.mean(scores[first == second] >= threshold)
    held = []
    for _ in range(60):
        found = PeopleBootstrap(*scores_of_people(people, 3, generator), draws=100)
        intervals, truths = [*found.at_threshold(threshold), *found.tar_at_far([0.1])], [0.1, tar, tar]
        held.append([low <= truth <= high for (low, high), truth in zip(intervals, truths, strict=True)])
    assert (np.mean(held, axis=0) >= 0.8).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exact_interval(5, 4), "hits must be a whole number from 0 to 4, not 5"),
        (lambda: exact_interval(0, 0), "count must be a whole number, 1 or more, not 0"),
        (lambda: exact_interval(1, 2, 1.5), "level must"),
        (lambda: PeopleBootstrap([1.0], [0], [0, 1]), "equally many first and second people, not 1 and 2"),
        (lambda: PeopleBootstrap([1.0], [0.0], [0.0]), "people of pairs must be integers"),
        (lambda: PeopleBootstrap([math.nan], [0], [0]), "scores must be finite"),
        (lambda: PeopleBootstrap([1.0], [0], [0], draws=1), "draws must be a whole number, 2 or more, not 1"),
        (lambda: PeopleBootstrap([1.0], [0], [0]).tar_at_far([0.0]), "far must be above 0 and below 1, not 0.0"),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
