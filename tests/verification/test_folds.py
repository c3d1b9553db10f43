"""Folds of pairs: random ones, and folds that share no person."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcnet.verification import all_pairs, make_folds, people_folds


@given(st.lists(st.booleans(), min_size=4, max_size=60).filter(lambda same: 2 <= sum(same) <= len(same) - 2))
def test_random_folds_divide_both_kinds_evenly(same):
    same = torch.tensor(same)
    folds = make_folds(same)
    count = min(10, int(same.sum()), int((~same).sum()))
    for kind in (same, ~same):
        sizes = torch.bincount(folds[kind], minlength=count).tolist()
        assert len(sizes) == count
        assert max(sizes) - min(sizes) <= 1
    assert torch.equal(folds, make_folds(same))


def test_make_folds_takes_answers_of_0_and_1():
    same = torch.tensor([True, False, True, False, False, True, True, False])
    for kind in (torch.int64, torch.uint8, torch.float32):
        assert torch.equal(make_folds(same.to(kind), 4), make_folds(same, 4))
    with pytest.raises(ValueError, match="same must be True or False for each pair, not 2"):
        make_folds(torch.tensor([0, 1, 2, 1, 0]))


@pytest.mark.parametrize("count", [1, 0, -3])
def test_make_folds_rejects_fewer_than_two_folds(count):
    message = f"count must be a whole number, 2 or more, not {count}"
    with pytest.raises(ValueError, match=message):
        make_folds(torch.tensor([True, True, False, False]), count)


def test_make_folds_requires_two_pairs_of_each_kind():
    with pytest.raises(ValueError, match="two pairs or more of each kind, not 3 and 1"):
        make_folds(torch.tensor([True, True, True, False]))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.integers(0, 3), st.sampled_from([2, 3, 5]))
def test_folds_share_no_person(labels, seed, count):
    labels = torch.tensor(labels)
    pairs = all_pairs(labels)
    people = labels[pairs.first], labels[pairs.second]
    if len(labels.unique()) < 2 * count:
        with pytest.raises(ValueError, match=f"{count} folds need {2 * count} people or more"):
            people_folds(*people, count, seed)
        return
    folds = people_folds(*people, count, seed)
    homes = {}
    for fold, first, second in zip(folds.tolist(), *(part.tolist() for part in people), strict=True):
        assert -1 <= fold < count
        assert fold != -1 or first != second
        if fold != -1:
            homes.setdefault(first, fold)
            homes.setdefault(second, fold)
            assert homes[first] == homes[second] == fold
    sizes = Counter(homes.values())
    assert set(sizes) == set(range(count))
    assert max(sizes.values()) - min(sizes.values()) <= 2
    # A pair without a fold has people of two folds.
    across = (folds == -1).nonzero()[:, 0].tolist()
    assert all(homes[int(people[0][at])] != homes[int(people[1][at])] for at in across)


def test_folds_have_similar_numbers_of_genuine_pairs():
    """45 + 21 and 36 + 28 genuine pairs."""
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 9, 8, 7]))
    pairs = all_pairs(labels)
    for seed in range(5):
        folds = people_folds(labels[pairs.first], labels[pairs.second], 2, seed)
        assert sorted(folds[pairs.same].bincount().tolist()) == [64, 66]
