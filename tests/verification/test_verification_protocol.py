"""The ten folds of LFW and its view 1, against plain loops."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcnet.verification import accuracy, best_threshold, development_accuracy, fold_accuracy, make_folds

scores_and_answers = st.lists(
    st.tuples(st.one_of(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), st.floats(-1, 1)), st.booleans()),
    min_size=1,
    max_size=25,
)
both_kinds = scores_and_answers.filter(lambda rows: len({same for _, same in rows}) == 2)


def tensors(rows):
    return torch.tensor([row[0] for row in rows], dtype=torch.float64), torch.tensor([row[1] for row in rows])


def told_right(rows, threshold, balanced):
    right = [(score >= threshold) == same for score, same in rows]
    if not balanced:
        return sum(right) / len(rows)
    kinds = [[ok for ok, (_, same) in zip(right, rows, strict=True) if same is kind] for kind in (True, False)]
    return sum(sum(kind) / len(kind) for kind in kinds) / 2


def candidates(rows):
    """A threshold in each gap between scores, and beyond both ends."""
    distinct = sorted({score for score, _ in rows})
    return [*distinct, distinct[-1] + 1]


@given(scores_and_answers)
def test_no_threshold_is_better_than_the_best(rows):
    found = best_threshold(*tensors(rows))
    best = max(told_right(rows, threshold, False) for threshold in candidates(rows))
    assert told_right(rows, found, False) == pytest.approx(best, abs=1e-12)
    assert accuracy(*tensors(rows), found) == pytest.approx(best, abs=1e-12)


@given(both_kinds)
def test_no_threshold_is_better_than_the_best_balanced_one(rows):
    found = best_threshold(*tensors(rows), balanced=True)
    best = max(told_right(rows, threshold, True) for threshold in candidates(rows))
    assert told_right(rows, found, True) == pytest.approx(best, abs=1e-12)
    assert accuracy(*tensors(rows), found, balanced=True) == pytest.approx(best, abs=1e-12)


@given(scores_and_answers)
def test_of_equally_good_thresholds_it_is_the_highest(rows):
    found = best_threshold(*tensors(rows))
    best = told_right(rows, found, False)
    assert all(
        told_right(rows, other, False) < best - 1e-12
        for other in candidates(rows)
        if other > found + 1e-12 and any(found <= score < other for score, _ in rows)
    )


def test_where_the_threshold_lies():
    same = torch.tensor([True, True, False, False])
    assert best_threshold(torch.tensor([0.75, 0.5, 0.25, 0.0]), same) == 0.375
    assert best_threshold(torch.tensor([0.75, 0.5]), same[:2]) == 0.5
    assert 0.75 < best_threshold(torch.tensor([0.75, 0.5]), same[2:]) < 0.7500001
    tied = best_threshold(torch.tensor([0.75, 0.5, 0.25, 0.0]), torch.tensor([True, False, True, False]))
    assert tied == 0.625


def test_a_gap_without_a_middle_still_parts_its_ends():
    above = 0.25000000000000006
    scores = torch.tensor([0.25, above], dtype=torch.float64)
    threshold = best_threshold(scores, torch.tensor([False, True]))
    assert 0.25 < threshold <= above


def fold_rows(count=70):
    generator = torch.Generator().manual_seed(3)
    same = torch.rand(count, generator=generator) < 0.3
    scores = (0.4 * same + torch.randn(count, generator=generator) * 0.4).mul(10).round() / 10
    return scores, same, torch.arange(count) % 7


@pytest.mark.parametrize("balanced", [False, True])
def test_every_fold_is_told_by_the_threshold_of_the_others(balanced):
    scores, same, folds = fold_rows()
    found = fold_accuracy(scores, same, folds, balanced)
    rows = list(zip(scores.double().tolist(), same.tolist(), strict=True))
    expected = []
    for fold in range(7):
        others = [row for row, at in zip(rows, folds.tolist(), strict=True) if at != fold]
        inside = [row for row, at in zip(rows, folds.tolist(), strict=True) if at == fold]
        best = max(told_right(others, threshold, balanced) for threshold in candidates(others))
        assert told_right(others, found.thresholds[fold], balanced) == pytest.approx(best)
        expected.append(told_right(inside, found.thresholds[fold], balanced))
    assert found.accuracies == pytest.approx(expected)
    assert found.mean == pytest.approx(statistics.mean(expected))
    assert found.standard_error == pytest.approx(statistics.stdev(expected) / 7**0.5)


def test_the_scores_of_a_fold_do_not_move_its_own_threshold():
    scores, same, folds = fold_rows()
    changed = torch.where(folds == 2, -scores, scores)
    found, other = fold_accuracy(scores, same, folds), fold_accuracy(changed, same, folds)
    assert found.thresholds[2] == other.thresholds[2]
    assert found.accuracies[2] != other.accuracies[2]


def test_balanced_and_plain_accuracy_differ_where_kinds_do():
    scores, same = torch.tensor([0.9, 0.1, 0.1, 0.1]), torch.tensor([True, True, True, False])
    assert accuracy(scores, same, 0.5) == 0.5
    assert accuracy(scores, same, 0.5, balanced=True) == pytest.approx((1 / 3 + 1) / 2)


def test_numbers_in_a_list_stay_what_they_are():
    """As float32, 0.7 is less than 0.7."""
    assert accuracy([0.7, 0.1], [True, False], threshold=0.7) == 1
    assert best_threshold([0.7, 0.1], [True, False]) == 0.4


def test_view_one():
    development = (torch.tensor([0.8, 0.6, 0.4, 0.2]), torch.tensor([True, True, False, False]))
    test = (torch.tensor([0.55, 0.45, 0.35, 0.3]), torch.tensor([True, True, False, False]))
    found = development_accuracy(development, test)
    assert found.threshold == pytest.approx(0.5)
    assert (found.accuracy, found.development_accuracy) == (0.75, 1.0)


def test_what_has_no_folds_or_kinds_is_said():
    scores, same = torch.tensor([0.1, 0.2]), torch.tensor([True, True])
    with pytest.raises(ValueError, match=r"folds must be \[2\], one number for each pair, not \[3\]"):
        fold_accuracy(scores, same, torch.zeros(3))
    with pytest.raises(ValueError, match="needs two folds or more, not 1"):
        fold_accuracy(scores, same, torch.zeros(2))
    with pytest.raises(ValueError, match="needs pairs of both kinds, not 2 of the same and 0 different ones"):
        best_threshold(scores, same, balanced=True)
    with pytest.raises(ValueError, match="needs pairs of both kinds"):
        accuracy(scores, ~same, 0.1, balanced=True)


@given(st.lists(st.booleans(), min_size=4, max_size=60).filter(lambda same: 2 <= sum(same) <= len(same) - 2))
def test_folds_by_chance_share_out_both_kinds_evenly(same):
    same = torch.tensor(same)
    folds = make_folds(same)
    count = min(10, int(same.sum()), int((~same).sum()))
    for kind in (same, ~same):
        sizes = torch.bincount(folds[kind], minlength=count).tolist()
        assert len(sizes) == count
        assert max(sizes) - min(sizes) <= 1
    assert torch.equal(folds, make_folds(same))


def test_answers_of_0_and_1_have_the_folds_of_false_and_true():
    same = torch.tensor([True, False, True, False, False, True, True, False])
    for kind in (torch.int64, torch.uint8, torch.float32):
        assert torch.equal(make_folds(same.to(kind), 4), make_folds(same, 4))
    with pytest.raises(ValueError, match="same must be True or False for each pair, not 2"):
        make_folds(torch.tensor([0, 1, 2, 1, 0]))


@pytest.mark.parametrize("count", [1, 0, -3])
def test_one_fold_has_no_others_for_its_threshold(count):
    says = f"count must be at least 2, since each fold takes its threshold from others, not {count}"
    with pytest.raises(ValueError, match=says):
        make_folds(torch.tensor([True, True, False, False]), count)


def test_folds_need_two_pairs_of_each_kind():
    with pytest.raises(ValueError, match="two pairs or more of the same and two of different ones, not 3 and 1"):
        make_folds(torch.tensor([True, True, True, False]))
