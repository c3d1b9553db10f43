"""Recall@k and mean average precision, against plain loops and pytorch-metric-learning."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dcnet.verification import retrieval, retrieve


def in_a_loop(
    scores: list[list[float]], labels: list[int], owners: list[int], ks: tuple[int, ...], itself: bool
) -> tuple[dict[int, float], float, int]:
    """Of a ranking in which others come before matches with the same score."""
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
    # Of a few points many images have the very same embedding.
    points = torch.randn(4 if ties else count, 6, generator=chance)
    return points[torch.arange(count) % len(points)], torch.randint(classes, (count,), generator=chance)


def by_double(one: Tensor, two: Tensor) -> list[list[float]]:
    unit = [torch.nn.functional.normalize(each.double()) for each in (one, two)]
    return [[round(score, 6) for score in row] for row in (unit[0] @ unit[1].T).tolist()]


@pytest.mark.parametrize("at_once", [1, 70, 1 << 22])
@pytest.mark.parametrize("ties", [False, True])
def test_they_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch, ties: bool, at_once: int):
    """With queries among themselves and with a gallery, some without a match, however many at a time."""
    monkeypatch.setattr(retrieval, "AT_ONCE", at_once)
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


def test_they_are_those_of_pytorch_metric_learning():
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
    for given in ((queries, labels), (queries, labels, gallery, owners)):
        found = retrieve(*given)
        # Of all of the gallery.
        measure.k = found.gallery
        expected = measure.get_accuracy(*given)
        assert found.unmatched == 0
        assert found.recall[1] == pytest.approx(expected["precision_at_1"])
        assert found.mean_average_precision == pytest.approx(expected["mean_average_precision"], rel=1e-6)


def test_by_hand():
    """Ranking of the one query: other, match, other, match; average precision (1/2 + 2/4) / 2."""
    gallery = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in (0.1, 0.2, 0.3, 0.4)])
    found = retrieve([[1.0, 0.0]], [5], gallery, [4, 5, 4, 5], ks=(1, 2))
    assert found.recall == {1: 0.0, 2: 1.0}
    assert found.mean_average_precision == pytest.approx(0.5)


def test_a_network_that_gives_the_same_for_all_finds_nothing_early():
    found = retrieve(torch.ones(20, 3), torch.arange(20) % 2, ks=(1, 10, 11))
    assert found.recall == {1: 0.0, 10: 0.0, 11: 1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([[1.0, 0.0]], [0]), "none of the 1 queries has an image of its class in the gallery"),
        (([[1.0, 0.0]], [0], [[1.0, 0.0]]), "gallery and gallery_labels go together: give both, or none"),
        (([[1.0, 0.0]], [0, 1]), "labels must be integers [1], not torch.int64 [2]"),
        (([[1.0, 0.0]], [0.5]), "labels must be integers [1], not torch.float64 [1]"),
        (([], []), "embeddings must be [N, D] and not empty, not [0]"),
        (([[1.0, 0.0]], [0], [[1.0, 0.0, 0.0]], [0]), "must have as many values each, not 2 and 3"),
        (([[1.0, 0.0]], [0], None, None, ()), "ks must be one number or more, such as (1, 5, 10), not none"),
        (([[1.0, 0.0]], [0], None, None, (0,)), "each of ks must be a whole number, 1 or more, not 0"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(given: Any, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        retrieve(*given)
