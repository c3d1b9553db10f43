"""Scores of pairs, against plain loops; all pairs without ever holding all of them."""

import math

import pytest
import torch
from largest_tensor import Largest
from torch.utils._python_dispatch import TorchDispatchMode

from dcnet.verification import ScoreHistogram, nearest, pair_scores, score_histogram


def cosine(first: list[float], second: list[float]) -> float:
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


class Precisions(TorchDispatchMode):
    """The precisions that matrices are multiplied in."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


def brute_force_histogram(embeddings, labels, bins):
    genuine, impostor = [0] * bins, [0] * bins
    rows = embeddings.double().tolist()
    for i in range(len(rows)):
        for j in range(i):
            place = min(int((cosine(rows[i], rows[j]) + 1) / 2 * bins), bins - 1)
            (genuine if labels[i] == labels[j] else impostor)[place] += 1
    return genuine, impostor


def test_scores_of_listed_pairs(device):
    embeddings = torch.randn(7, 5) * torch.logspace(-3, 3, 7)[:, None]
    first, second = torch.tensor([0, 6, 3, 3]), torch.tensor([1, 2, 3, 0])
    found = pair_scores(embeddings.to(device), first, second)
    rows = embeddings.double().tolist()
    expected = [cosine(rows[i], rows[j]) for i, j in zip(first, second, strict=True)]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.max() <= 1


def test_listed_pairs_in_several_blocks(monkeypatch):
    embeddings = torch.randn(20, 5)
    first, second = torch.randint(20, (2, 50))
    expected = pair_scores(embeddings, first, second)
    monkeypatch.setattr("dcnet.verification.scores.PAIR_BLOCK", 7)
    assert torch.equal(pair_scores(embeddings, first, second), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_indices_are_integers_of_any_kind(dtype):
    # As many pairs as embeddings, which bytes could be the mask of.
    embeddings, first, second = torch.randn(4, 5), torch.tensor([0, 1, 1, 3]), torch.tensor([3, 0, 2, 3])
    expected = pair_scores(embeddings, first, second)
    assert torch.equal(pair_scores(embeddings, first.to(dtype), second.to(dtype)), expected)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([0, 3], [1, 1], "from 0 to 2, not 3"),
        ([0, -1], [1, 1], "from 0 to 2, not -1"),
        ([0, 1], [1], "as many first as second images, not 2 and 1"),
        ([0.5], [1.0], "must be integers"),
        ([], [], "not none"),
    ],
)
def test_indices_that_are_none_are_refused(first, second, says):
    with pytest.raises(ValueError, match=says):
        pair_scores(torch.randn(3, 2), torch.tensor(first), torch.tensor(second))


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("bins", [2, 64])
def test_all_pairs_are_counted_once(block, bins, device):
    embeddings, labels = torch.randn(23, 4), torch.randint(4, (23,))
    found = score_histogram(embeddings.to(device), labels, bins, block)
    assert (found.genuine.tolist(), found.impostor.tolist()) == brute_force_histogram(embeddings, labels, bins)
    assert int((found.genuine + found.impostor).sum()) == 23 * 22 // 2


def test_scores_at_the_ends_are_in_the_first_and_the_last_bin():
    found = score_histogram(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0]]), torch.tensor([0, 0, 0]), bins=10)
    assert found.genuine.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found.impostor.sum() == 0
    assert found.edges().tolist() == pytest.approx([-1 + 0.2 * i for i in range(10)])


def test_histograms_add():
    embeddings, labels = torch.randn(9, 3), torch.randint(2, (9,))
    one = score_histogram(embeddings, labels, 50)
    assert torch.equal((one + one).genuine, 2 * one.genuine)
    assert torch.equal((one + one).impostor, 2 * one.impostor)
    with pytest.raises(ValueError, match="histograms of 50 and of 2 bins"):
        one + ScoreHistogram(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("block", [1, 4, 100])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_the_nearest_of_a_gallery(block, count, device):
    probes, gallery = torch.randn(9, 4), torch.randn(11, 4)
    found = nearest(probes.to(device), gallery.to(device), count, block)
    for probe, scores, indices in zip(probes.double().tolist(), found.scores, found.indices, strict=True):
        all_scores = [cosine(probe, one) for one in gallery.double().tolist()]
        order = sorted(range(11), key=lambda at: -all_scores[at])[:count]
        assert indices.tolist() == order
        assert scores.tolist() == pytest.approx([all_scores[at] for at in order], abs=1e-6)


@pytest.mark.parametrize("block", [1, 4, 100])
def test_none_is_its_own_neighbour(block):
    embeddings = torch.randn(10, 3)
    rows = embeddings.double().tolist()
    found = nearest(embeddings, count=9, block=block)
    for at in range(10):
        order = sorted(set(range(10)) - {at}, key=lambda other: -cosine(rows[at], rows[other]))
        assert found.indices[at].tolist() == order
    with pytest.raises(ValueError, match="count must be from 1 to 9, as many as there are to compare with, not 10"):
        nearest(embeddings, count=10)


def test_embeddings_of_another_network_are_refused():
    with pytest.raises(ValueError, match="embeddings that are compared must have as many values each, not 3 and 2"):
        nearest(torch.randn(4, 3), torch.randn(5, 2))


def test_scores_are_full_float32_whatever_was_set():
    embeddings, labels = torch.randn(60, 64), torch.randint(2, (60,))
    expected = score_histogram(embeddings, labels)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16), Precisions() as precisions:
            found = score_histogram(embeddings, labels)
            scores = nearest(embeddings).scores
        assert torch.get_float32_matmul_precision() == "medium"
        # A CPU computes the same in all of them, a GPU does not.
        assert precisions.seen == {"highest"}
    finally:
        torch.set_float32_matmul_precision(before)
    assert scores.dtype == torch.float32
    assert torch.equal(found.genuine, expected.genuine)
    assert torch.equal(scores, nearest(embeddings).scores)


def test_all_pairs_are_never_held_at_once():
    count, block = 20_000, 1024
    embeddings, labels = torch.randn(count, 64), torch.randint(100, (count,))
    with Largest() as largest:
        found = score_histogram(embeddings, labels, block=block)
    assert int((found.genuine + found.impostor).sum()) == count * (count - 1) // 2
    assert block * block <= largest.elements <= max(2 * block * block, embeddings.numel())
    with Largest() as largest:
        nearest(embeddings[:2000], embeddings, 5, block)
    assert largest.elements <= max(2 * block * block, embeddings.numel())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"labels": torch.zeros(3).long()}, r"labels must be integers \[4\], not torch.int64 \[3\]"),
        ({"labels": torch.zeros(4)}, r"labels must be integers \[4\], not torch.float32"),
        ({"bins": 1}, "bins must be at least 2, not 1"),
        ({"block": 0}, "block must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_counted_is_said(options, says):
    with pytest.raises(ValueError, match=says):
        score_histogram(torch.randn(4, 2), **{"labels": torch.zeros(4).long(), **options})
