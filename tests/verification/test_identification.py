"""Identification and retrieval, against plain loops and pytorch-metric-learning."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from helpers.largest_tensor import Largest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcnet.verification import Identified, cmc, identification, identify, open_set_rate, retrieve

# Vectors whose cosines are exact, with many ties among them.
directions = st.sampled_from([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0), (2.0, 0.0), (3.0, 4.0), (4.0, 3.0)])
people = st.integers(0, 4)
sets = st.tuples(
    st.lists(st.tuples(directions, people), min_size=1, max_size=8),
    st.lists(st.tuples(directions, people), min_size=1, max_size=12),
)


def cosine(first, second):
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.hypot(*first) / math.hypot(*second)


def by_hand(probes, gallery, pool):
    """For each probe the best score, the score of each person, and the rank of the right person."""
    found = []
    for vector, who in probes:
        scores = {}
        for person in sorted({person for _, person in gallery}):
            all_scores = [cosine(vector, other) for other, owner in gallery if owner == person]
            scores[person] = max(all_scores) if pool == "max" else sum(all_scores) / len(all_scores)
        ahead = [p for p, score in scores.items() if p != who and score >= scores.get(who, math.inf) - 1e-6]
        found.append((max(scores.values()), scores, len(ahead) + 1 if who in scores else 0))
    return found


def tensors(rows):
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


@given(sets, st.sampled_from(["max", "mean"]), st.sampled_from([1, 3, 100]))
def test_identify_matches_plain_loops_with_ties(both, pool, block):
    probes, gallery = both
    found = identify(*tensors(probes), *tensors(gallery), pool=pool, block=block)
    for at, (best, scores, rank) in enumerate(by_hand(probes, gallery, pool)):
        assert float(found.scores[at]) == pytest.approx(best, abs=1e-6)
        assert scores[int(found.people[at])] == pytest.approx(best, abs=1e-6)
        # Means are rounded, so scores that are equal to six digits may be in any order.
        if pool == "max" or not near(scores):
            assert int(found.ranks[at]) == rank


def near(scores):
    values = sorted(scores.values())
    return any(b - a < 1e-5 for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("block", [1, 4, 1000])
def test_identify_matches_plain_loops_on_random_embeddings(pool, block, device):
    probes = [
        (vector, who) for vector, who in zip(torch.randn(30, 5).tolist(), (torch.arange(30) % 9).tolist(), strict=True)
    ]
    gallery = [
        (vector, who) for vector, who in zip(torch.randn(40, 5).tolist(), (torch.arange(40) % 7).tolist(), strict=True)
    ]
    found = identify(*(part.to(device) for part in (*tensors(probes), *tensors(gallery))), pool=pool, block=block)
    expected = by_hand(probes, gallery, pool)
    assert found.ranks.tolist() == [rank for *_, rank in expected]
    assert found.known.tolist() == [who < 7 for _, who in probes]
    assert found.scores.tolist() == pytest.approx([best for best, *_ in expected], abs=1e-6)


@pytest.mark.parametrize("images", [2, 1500])
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_identify_compares_in_blocks(pool, images):
    embeddings, people = torch.randn(3000, 8), torch.arange(3000) // images
    with Largest() as largest:
        found = identify(embeddings, people, embeddings, people, pool, block=256)
    assert largest.elements <= 2 * 256 * 256
    assert pool == "mean" or found.ranks.tolist() == [1] * 3000
    assert found.people[found.ranks == 1].equal(people[found.ranks == 1])


def test_cmc():
    found = Identified(torch.zeros(5), torch.zeros(5), torch.tensor([1, 1, 2, 4, 9]))
    assert cmc(found, 4) == pytest.approx((0.4, 0.6, 0.6, 0.8))
    with pytest.raises(ValueError, match="ranks must be a whole number, 1 or more, not 0"):
        cmc(found, 0)


def test_equal_scores_rank_last():
    ones = torch.ones(6, 2)
    found = identify(ones, torch.arange(6), ones, torch.arange(6))
    assert found.ranks.tolist() == [6] * 6
    assert cmc(found, 6) == (0, 0, 0, 0, 0, 1)
    assert found.people.tolist() == [0] * 6


def test_cmc_rejects_unknown_probes():
    found = Identified(torch.zeros(3), torch.zeros(3), torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="the person of every probe, but 2 of 3 are not in it"):
        cmc(found)


def open_set_by_hand(found, fpir):
    """The best rate of all thresholds within the false positive rate."""
    rows = list(zip(found.scores.tolist(), found.ranks.tolist(), strict=True))
    unknown = [score for score, rank in rows if rank == 0]
    known = [(score, rank) for score, rank in rows if rank > 0]
    best = 0.0
    for threshold in {score for score, _ in rows}:
        if sum(score >= threshold for score in unknown) <= fpir * len(unknown) + 1e-9:
            best = max(best, sum(score >= threshold and rank == 1 for score, rank in known) / len(known))
    return best


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 3)), min_size=2, max_size=30).filter(
        lambda rows: {rank > 0 for _, rank in rows} == {True, False}
    ),
    st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]),
)
def test_open_set_rate_uses_the_lowest_threshold_within_the_rate(rows, fpir):
    found = Identified(
        torch.tensor([row[0] / 5 for row in rows]), torch.zeros(1), torch.tensor([row[1] for row in rows])
    )
    rate = open_set_rate(found, fpir)
    unknown = [score for score, rank in zip(found.scores.tolist(), found.ranks.tolist(), strict=True) if rank == 0]
    assert (rate.unknown, rate.known) == (len(unknown), len(rows) - len(unknown))
    if len(unknown) * fpir < 1 - 1e-9:
        assert (rate.tpir, rate.threshold) == (None, None)
        assert f"{len(unknown)} unknown probes are too few for a rate of {fpir:g}" in rate.note
        return
    assert rate.tpir == pytest.approx(open_set_by_hand(found, fpir))
    assert sum(score >= rate.threshold for score in unknown) <= fpir * len(unknown) + 1e-9


def test_open_set_rate_counts_only_correct_identifications():
    ranks = torch.tensor([1, 2, 1, 0, 0])
    found = Identified(torch.tensor([0.9, 0.8, 0.2, 0.5, 0.1]), torch.zeros(5), ranks)
    assert open_set_rate(found, 0.5).tpir == pytest.approx(2 / 3)
    assert open_set_rate(found, 0.5).threshold == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "sum"}, "unknown pool 'sum': known are max, mean"),
        ({"block": 0}, "block must be a whole number, 1 or more, not 0"),
        ({"probe_people": torch.zeros(2)}, "labels must be integers"),
        ({"gallery_people": torch.zeros(4).long()}, r"labels must be integers \[3\]"),
    ],
)
def test_identify_rejects_invalid_arguments(options, message):
    given = {"probe_people": torch.zeros(2).long(), "gallery_people": torch.zeros(3).long(), **options}
    with pytest.raises(ValueError, match=message):
        identify(torch.randn(2, 3), gallery=torch.randn(3, 3), **given)


def test_open_set_rate_requires_unknown_probes_and_a_valid_rate():
    with pytest.raises(ValueError, match="an open set needs known and unknown probes, not 2 and 0"):
        open_set_rate(Identified(torch.zeros(2), torch.zeros(2), torch.tensor([1, 1])))
    with pytest.raises(ValueError, match="an open set needs known and unknown probes, not 0 and 2"):
        open_set_rate(Identified(torch.zeros(2), torch.zeros(2), torch.tensor([0, 0])), 0.5)
    with pytest.raises(ValueError, match="fpir must be above 0 and below 1, not 1"):
        open_set_rate(Identified(torch.zeros(2), torch.zeros(2), torch.tensor([1, 0])), 1)


def in_a_loop(
    scores: list[list[float]], labels: list[int], owners: list[int], ks: tuple[int, ...], itself: bool
) -> tuple[dict[int, float], float, int]:
    """Recall, precision and number of queries; of equal scores, matches rank last."""
    found, precisions = dict.fromkeys(ks, 0), []
    for query, row in enumerate(scores):
        places = [at for at in range(len(row)) if not (itself and at == query)]
        ranked = sorted(places, key=lambda at: (-row[at], owners[at] == labels[query]))
        hits = [rank for rank, at in enumerate(ranked, start=1) if owners[at] == labels[query]]
        if not hits:
            continue
        precisions.append(sum(count / rank for count, rank in enumerate(hits, start=1)) / len(hits))
        for k in ks:
            found[k] += hits[0] <= k
    return (
        {k: count / len(precisions) for k, count in found.items()},
        sum(precisions) / len(precisions),
        len(precisions),
    )


def drawn(count: int, classes: int, seed: int, ties: bool = False) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    # With ties, many images share one of four embeddings.
    points = torch.randn(4 if ties else count, 6, generator=chance)
    return points[torch.arange(count) % len(points)], torch.randint(classes, (count,), generator=chance)


def by_double(one: Tensor, two: Tensor) -> list[list[float]]:
    unit = [torch.nn.functional.normalize(each.double()) for each in (one, two)]
    return [[round(score, 6) for score in row] for row in (unit[0] @ unit[1].T).tolist()]


@pytest.mark.parametrize("at_once", [1, 70, 1 << 22])
@pytest.mark.parametrize("ties", [False, True])
def test_retrieve_matches_plain_loops(monkeypatch: pytest.MonkeyPatch, ties: bool, at_once: int):
    """With and without a gallery, with queries without a match, and for every block size."""
    monkeypatch.setattr(identification, "RANKED", at_once)
    queries, labels = drawn(23, 9, seed=0, ties=ties)
    gallery, owners = drawn(31, 7, seed=1, ties=ties)
    ks = (1, 3, 10, 1000)
    for other, whose in ((None, None), (gallery, owners)):
        found = retrieve(queries, labels, other, whose, ks)
        columns, of_columns = (queries, labels) if other is None else (gallery, owners)
        scores = by_double(queries, columns)
        recall, precision, count = in_a_loop(scores, labels.tolist(), of_columns.tolist(), ks, other is None)
        assert found.recall == pytest.approx(recall)
        assert found.mean_average_precision == pytest.approx(precision)
        assert (found.queries, found.unmatched) == (count, 23 - count)
        assert found.gallery == len(columns) - (other is None)
        assert found.recall[1000] == 1


def test_retrieve_matches_pytorch_metric_learning():
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    queries, labels = drawn(40, 6, seed=2)
    gallery, owners = drawn(60, 6, seed=3)
    measure = AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision"),
        k=None,
        knn_func=CustomKNN(CosineSimilarity()),
        device=torch.device("cpu"),
    )
    for arguments in ((queries, labels), (queries, labels, gallery, owners)):
        found = retrieve(*arguments)
        # The whole gallery.
        measure.k = found.gallery
        expected = measure.get_accuracy(*arguments)
        assert found.unmatched == 0
        assert found.recall[1] == pytest.approx(expected["precision_at_1"])
        assert found.mean_average_precision == pytest.approx(expected["mean_average_precision"], rel=1e-6)


def test_retrieve_one_query_computed_by_hand():
    """The ranking is other, match, other, match, with average precision (1/2 + 2/4) / 2."""
    gallery = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in (0.1, 0.2, 0.3, 0.4)])
    found = retrieve([[1.0, 0.0]], [5], gallery, [4, 5, 4, 5], ks=(1, 2))
    assert found.recall == {1: 0.0, 2: 1.0}
    assert found.mean_average_precision == pytest.approx(0.5)


def test_retrieve_ranks_matches_last_among_equal_scores():
    found = retrieve(torch.ones(20, 3), torch.arange(20) % 2, ks=(1, 10, 11))
    assert found.recall == {1: 0.0, 10: 0.0, 11: 1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([[1.0, 0.0]], [0]), "none of the 1 queries has an image of its class in the gallery"),
        (([[1.0, 0.0]], [0], [[1.0, 0.0]]), "gallery and gallery_labels go together: give both, or neither"),
        (([[1.0, 0.0]], [0, 1]), "labels must be integers [1], not torch.int64 [2]"),
        (([[1.0, 0.0]], [0.5]), "labels must be integers [1], not torch.float64 [1]"),
        (([], []), "embeddings must be [N, D] and not empty, not [0]"),
        (([[1.0, 0.0]], [0], [[1.0, 0.0, 0.0]], [0]), "must have the same number of values, not 2 and 3"),
        (([[1.0, 0.0]], [0], None, None, ()), "ks is empty: give one number or more, such as (1, 5, 10)"),
        (([[1.0, 0.0]], [0], None, None, (0,)), "each of ks must be a whole number, 1 or more, not 0"),
    ],
)
def test_retrieve_rejects_invalid_arguments(given: Any, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        retrieve(*given)
