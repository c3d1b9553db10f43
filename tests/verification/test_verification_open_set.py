"""Classes that are left out of training, and pairs of them."""

from collections import Counter
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from largest_tensor import Largest

from dcnet.data import Dataset, Split
from dcnet.verification import sample_pairs, split_classes
from dcnet.verification.sampling import _pair_of_rank


def dataset(classes: int = 7, images: int = 60) -> Dataset:
    """The first pixel of an image is its class, the second its number."""

    def split(start: int) -> Split:
        labels = torch.arange(images) * 5 % classes
        pixels = torch.zeros(images, 1, 2, 2, dtype=torch.uint8)
        pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = labels, torch.arange(start, start + images)
        return Split(pixels, labels)

    return Dataset("letters", split(0), split(images), tuple("abcdefghijklm"[:classes]))


def true_classes(split: Split) -> list[int]:
    return split.images[:, 0, 0, 0].tolist()


def test_classes_are_parted_and_named():
    whole = dataset()
    found = split_classes(whole, 3)
    assert len(found.known.classes) == 4
    assert len(found.unseen_classes) == 3
    assert {*found.known.classes, *found.unseen_classes} == set("abcdefg")
    assert list(found.known.classes) == sorted(found.known.classes)
    assert found.known.name == "letters-4-of-7-seed0"
    for split, names in (
        (found.known.train, found.known.classes),
        (found.known.test, found.known.classes),
        (found.unseen, found.unseen_classes),
    ):
        named = [names[label] for label in split.labels.tolist()]
        assert named == ["abcdefg"[true] for true in true_classes(split)]
        assert set(named) == set(names)


def test_no_image_is_lost_and_the_order_is_kept():
    whole = dataset()
    found = split_classes(whole, 3)
    numbers = {
        name: split.images[:, 0, 0, 1].tolist()
        for name, split in (("train", found.known.train), ("test", found.known.test), ("unseen", found.unseen))
    }
    assert all(part == sorted(part) for part in numbers.values())
    assert max(numbers["train"]) < 60 <= min(numbers["test"])
    assert sorted(number for part in numbers.values() for number in part) == list(range(120))


def test_the_seed_tells_which():
    whole = dataset(13)
    chosen = [split_classes(whole, 5, seed).unseen_classes for seed in range(8)]
    assert chosen == [split_classes(whole, 5, seed).unseen_classes for seed in range(8)]
    assert len(set(chosen)) > 4


@pytest.mark.parametrize("unseen", [0, 6, 7])
def test_too_few_or_too_many_are_refused(unseen):
    with pytest.raises(ValueError, match=f"from 1 to 5 of 7, not {unseen}"):
        split_classes(dataset(), unseen)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(1, 30), st.integers(0, 5))
def test_pairs_are_balanced_right_and_none_twice(labels, half, seed):
    sizes = Counter(labels).values()
    genuine = sum(comb(size, 2) for size in sizes)
    impostor = comb(len(labels), 2) - genuine
    if min(genuine, impostor) < half:
        kind = "one class" if genuine < half else "two classes"
        with pytest.raises(ValueError, match=f"pairs of {kind}, and not {half}: ask for fewer"):
            sample_pairs(torch.tensor(labels), 2 * half, seed)
        return
    found = sample_pairs(torch.tensor(labels), 2 * half, seed)
    rows = list(zip(found.first.tolist(), found.second.tolist(), found.same.tolist(), strict=True))
    assert all((labels[first] == labels[second]) is same for first, second, same in rows)
    assert all(first != second for first, second, _ in rows)
    assert len({frozenset(row[:2]) for row in rows}) == len(rows) == 2 * half
    assert sum(row[2] for row in rows) == half


def test_large_classes_do_not_take_all_pairs():
    labels = torch.tensor([0] * 100 + [1] * 10 + [2] * 2)
    found = sample_pairs(labels, 62)
    assert Counter(labels[found.first[found.same]].tolist()) == {0: 15, 1: 15, 2: 1}


def test_the_seed_tells_which_pairs():
    labels = torch.arange(200) % 10
    one, again, other = (sample_pairs(labels, 100, seed) for seed in (1, 1, 2))
    assert torch.equal(one.first, again.first)
    assert torch.equal(one.second, again.second)
    assert not torch.equal(one.first, other.first)


def test_pairs_are_drawn_from_everywhere():
    labels = torch.arange(12) % 3
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(400):
        found = sample_pairs(labels, 12, seed)
        counts.update(tuple(sorted(pair)) for pair in zip(found.first.tolist(), found.second.tolist(), strict=True))
    # 6 of 18 pairs of one class, and 6 of 48 of two, each time.
    same = [count for (i, j), count in counts.items() if (i - j) % 3 == 0]
    different = [count for (i, j), count in counts.items() if (i - j) % 3]
    assert (len(same), len(different)) == (18, 48)
    assert min(same) > 133 - 50
    assert max(same) < 133 + 50
    assert min(different) > 50 - 35
    assert max(different) < 50 + 35


def test_ranks_of_pairs():
    assert _pair_of_rank(torch.arange(6)).tolist() == [[0, 1], [0, 2], [1, 2], [0, 3], [1, 3], [2, 3]]
    large = 10**6
    ranks = torch.tensor([large * (large - 1) // 2 - 1, large * (large - 1) // 2])
    assert _pair_of_rank(ranks).tolist() == [[large - 2, large - 1], [0, large]]


def test_pairs_of_very_large_classes_are_drawn_without_a_list_of_all():
    """Of 100,000 images there are 5 billion pairs, whose numbers would take 40 GB."""
    labels = torch.arange(200_000) % 2
    with Largest() as largest:
        found = sample_pairs(labels, 2000)
    assert largest.elements <= len(labels)
    assert len(set(zip(found.first.tolist(), found.second.tolist(), strict=True))) == 2000
    assert torch.equal(labels[found.first] == labels[found.second], found.same)
    assert found.second[found.same].max() > 150_000


def test_so_drawn_none_is_there_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcnet.verification.sampling.ALL_AT_ONCE", 0)
    found = sample_pairs(torch.arange(8) % 2, 24)
    # All of the 12 pairs of one class.
    assert len(set(zip(found.first[:12].tolist(), found.second[:12].tolist(), strict=True))) == 12


@pytest.mark.parametrize("count", [0, 1, 3])
def test_counts_that_cannot_be_halved_are_refused(count):
    with pytest.raises(ValueError, match=f"count must be even and at least 2, for pairs of both kinds, not {count}"):
        sample_pairs(torch.arange(4) % 2, count)
