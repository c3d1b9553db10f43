"""ROC curves and accuracies of folds, against plain loops, scikit-learn, and with many ties."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from dcnet.verification import (
    ScoreHistogram,
    accuracy,
    best_threshold,
    development_accuracy,
    fold_accuracy,
    roc,
    roc_of_histogram,
    score_histogram,
)

# Few distinct scores, for ties within and between both kinds of pairs, and any other scores.
tied = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.25000000000000006, 0.5, 1.0])
anything = st.floats(-1, 1)
pairs = st.lists(st.tuples(st.one_of(tied, anything), st.booleans()), min_size=2, max_size=40).filter(
    lambda rows: len({same for _, same in rows}) == 2
)


def split(rows):
    return [score for score, same in rows if same], [score for score, same in rows if not same]


def curve(rows):
    return roc(
        torch.tensor([score for score, _ in rows], dtype=torch.float64), torch.tensor([same for _, same in rows])
    )


def share(scores, threshold):
    return sum(score >= threshold for score in scores) / len(scores)


@given(pairs)
def test_points_match_the_definition(rows):
    genuine, impostor = split(rows)
    found = curve(rows)
    assert found.thresholds[1:].tolist() == sorted({score for score, _ in rows}, reverse=True)
    assert found.thresholds[0] > found.thresholds[1]
    points = (part.tolist() for part in (found.thresholds, found.far, found.tar, found.frr))
    for threshold, far, tar, frr in zip(*points, strict=True):
        assert far == share(impostor, threshold)
        assert tar == share(genuine, threshold)
        assert frr == sum(score < threshold for score in genuine) / len(genuine)
    assert (float(found.far[0]), float(found.tar[0]), float(found.far[-1]), float(found.tar[-1])) == (0, 0, 1, 1)


@given(pairs)
def test_points_match_scikit_learn(rows):
    found = curve(rows)
    far, tar, thresholds = roc_curve(*np.array([(same, score) for score, same in rows]).T, drop_intermediate=False)
    assert found.far.tolist() == pytest.approx(far.tolist())
    assert found.tar.tolist() == pytest.approx(tar.tolist())
    assert found.thresholds[1:].tolist() == thresholds[1:].tolist()


@given(pairs)
def test_auc_is_the_probability_of_the_right_order(rows):
    genuine, impostor = split(rows)
    wins = sum((a > b) + 0.5 * (a == b) for a in genuine for b in impostor)
    found = curve(rows).auc()
    assert found == pytest.approx(wins / len(genuine) / len(impostor))
    assert found == pytest.approx(roc_auc_score([same for _, same in rows], [score for score, _ in rows]))


@given(pairs)
def test_eer_interpolates_between_points(rows):
    found = curve(rows)
    line = interp1d(found.far.numpy(), found.tar.numpy())
    by_parts = None
    for at in range(1, len(found.far)):
        (x0, y0), (x1, y1) = ((float(found.far[i]), float(found.tar[i])) for i in (at - 1, at))
        if x0 + y0 <= 1 <= x1 + y1:
            by_parts = x0 + (1 - x0 - y0) / (x1 + y1 - x0 - y0) * (x1 - x0)
            break
    assert found.eer() == pytest.approx(by_parts, abs=1e-12)
    assert 0 <= found.eer() <= 1
    # Where the curve is vertical, tar is not a function of far, and the root is only approximate.
    if len(set(found.far.tolist())) == len(found.far):
        assert found.eer() == pytest.approx(brentq(lambda far: 1 - far - line(far), 0, 1), abs=1e-9)


@given(pairs, st.sampled_from([0.001, 0.1, 0.25, 1 / 3, 0.5, 0.9]))
def test_tar_at_far_uses_the_lowest_threshold_within_the_rate(rows, rate):
    genuine, impostor = split(rows)
    found = curve(rows).tar_at_far(rate)
    if len(impostor) * rate < 1 - 1e-12:
        assert (found.tar, found.threshold) == (None, None)
        assert found.note.startswith(f"{len(impostor)} impostor pairs are too few for a rate of {rate:g}")
        return
    assert found.note.startswith("the threshold for") == (int(rate * len(impostor) + 1e-12) < 10)
    assert found.accepted == sum(score >= found.threshold for score in impostor)
    assert share(impostor, found.threshold) <= rate
    assert share(genuine, found.threshold) == found.tar
    lower = [score for score, _ in rows if score < found.threshold]
    assert all(share(impostor, score) > rate for score in lower)


def test_rates_reached_exactly_are_included():
    scores = torch.tensor([0.9] + [0.5 - i / 100 for i in range(10)])
    same = torch.tensor([False] + [True] * 1 + [False] * 9)
    assert roc(scores, same).tar_at_far(0.1).tar == 1.0
    assert roc(scores, same).tar_at_far(0.0999).tar is None
    assert "10 impostor pairs are too few for a rate of 0.0999: one of them is 0.1; 11 are needed" in (
        roc(scores, same).tar_at_far(0.0999).note
    )


def test_perfect_reversed_and_constant_scores():
    same = torch.tensor([True, True, False, False])
    perfect = roc(torch.tensor([0.9, 0.8, 0.2, 0.1]), same)
    assert (perfect.auc(), perfect.eer(), perfect.tar_at_far(0.5).tar) == (1, 0, 1)
    reversed_ = roc(-torch.tensor([0.9, 0.8, 0.2, 0.1]), same)
    assert (reversed_.auc(), reversed_.eer(), reversed_.tar_at_far(0.5).tar) == (0, 1, 0)
    constant = roc(torch.zeros(4), same)
    assert (constant.auc(), constant.eer(), constant.tar_at_far(0.5).tar) == (0.5, 0.5, 0)


@given(pairs, st.sampled_from([2, 5, 100]))
def test_curve_of_a_histogram_matches_its_bins(rows, bins):
    places = [min(int((score + 1) / 2 * bins), bins - 1) for score, _ in rows]
    counts = [
        torch.tensor(
            [
                sum(place == b and same is kind for place, (_, same) in zip(places, rows, strict=True))
                for b in range(bins)
            ]
        )
        for kind in (True, False)
    ]
    found = roc_of_histogram(ScoreHistogram(*counts))
    expected = curve([(place, same) for place, (_, same) in zip(places, rows, strict=True)])
    assert torch.equal(found.genuine, expected.genuine)
    assert torch.equal(found.impostor, expected.impostor)
    edges = [-1 + 2 * place / bins for place in expected.thresholds[1:].tolist()]
    assert found.thresholds[1:].tolist() == pytest.approx(edges)
    assert found.thresholds[0] > found.thresholds[1]
    assert found.auc() == pytest.approx(expected.auc())


def test_curve_of_a_fine_histogram_is_close_to_that_of_all_pairs():
    labels = torch.arange(300) % 10
    embeddings = torch.eye(10)[labels] + 0.7 * torch.randn(300, 10)
    unit = embeddings.double() / embeddings.double().norm(dim=1, keepdim=True)
    first, second = torch.triu_indices(300, 300, 1)
    exact = roc((unit[first] * unit[second]).sum(1), labels[first] == labels[second])
    found = roc_of_histogram(score_histogram(embeddings, labels))
    assert found.auc() == pytest.approx(exact.auc(), abs=1e-4)
    assert found.eer() == pytest.approx(exact.eer(), abs=1e-3)
    assert found.tar_at_far(0.01).tar == pytest.approx(exact.tar_at_far(0.01).tar, abs=0.01)
    assert found.tar_at_far(0.01).threshold == pytest.approx(exact.tar_at_far(0.01).threshold, abs=1e-3)


@pytest.mark.parametrize(
    ("scores", "same", "message"),
    [
        ([0.1, 0.2], [True, True], "there is no impostor pair"),
        ([0.1, 0.2], [False, False], "there is no genuine pair"),
        ([], [], r"not empty, not \[0\] and \[0\]"),
        ([0.1], [True, False], r"must be \[P\] and not empty, not \[1\] and \[2\]"),
        ([0.1, float("nan")], [True, False], "scores must be finite, but that of pair 1 is nan"),
        ([float("inf"), 0.0], [True, False], "that of pair 0 is inf"),
        ([0.1, 0.2], [2, 0], "same must be True or False for each pair, not 2"),
    ],
)
def test_roc_rejects_invalid_arguments(scores, same, message):
    with pytest.raises(ValueError, match=message):
        roc(torch.tensor(scores), torch.tensor(same))


def test_roc_rejects_an_empty_histogram():
    with pytest.raises(ValueError, match="the histogram is empty"):
        roc_of_histogram(ScoreHistogram(torch.zeros(4).long(), torch.zeros(4).long()))


@pytest.mark.parametrize("far", [0, 1, -0.1, float("nan")])
def test_tar_at_far_rejects_invalid_rates(far):
    with pytest.raises(ValueError, match="far must be above 0 and below 1, not"):
        roc(torch.tensor([0.1, 0.2]), torch.tensor([True, False])).tar_at_far(far)


scores_and_answers = st.lists(
    st.tuples(st.one_of(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), st.floats(-1, 1)), st.booleans()),
    min_size=1,
    max_size=25,
)
both_kinds = scores_and_answers.filter(lambda rows: len({same for _, same in rows}) == 2)


def tensors(rows):
    return torch.tensor([row[0] for row in rows], dtype=torch.float64), torch.tensor([row[1] for row in rows])


def share_correct(rows, threshold, balanced):
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
def test_best_threshold_maximizes_accuracy(rows):
    found = best_threshold(*tensors(rows))
    best = max(share_correct(rows, threshold, False) for threshold in candidates(rows))
    assert share_correct(rows, found, False) == pytest.approx(best, abs=1e-12)
    assert accuracy(*tensors(rows), found) == pytest.approx(best, abs=1e-12)


@given(both_kinds)
def test_best_threshold_maximizes_balanced_accuracy(rows):
    found = best_threshold(*tensors(rows), balanced=True)
    best = max(share_correct(rows, threshold, True) for threshold in candidates(rows))
    assert share_correct(rows, found, True) == pytest.approx(best, abs=1e-12)
    assert accuracy(*tensors(rows), found, balanced=True) == pytest.approx(best, abs=1e-12)


@given(scores_and_answers)
def test_best_threshold_is_the_highest_of_equal_ones(rows):
    found = best_threshold(*tensors(rows))
    best = share_correct(rows, found, False)
    assert all(
        share_correct(rows, other, False) < best - 1e-12
        for other in candidates(rows)
        if other > found + 1e-12 and any(found <= score < other for score, _ in rows)
    )


def test_best_threshold_is_between_scores():
    same = torch.tensor([True, True, False, False])
    assert best_threshold(torch.tensor([0.75, 0.5, 0.25, 0.0]), same) == 0.375
    assert best_threshold(torch.tensor([0.75, 0.5]), same[:2]) == 0.5
    assert 0.75 < best_threshold(torch.tensor([0.75, 0.5]), same[2:]) < 0.7500001
    tied = best_threshold(torch.tensor([0.75, 0.5, 0.25, 0.0]), torch.tensor([True, False, True, False]))
    assert tied == 0.625


def test_best_threshold_separates_adjacent_floats():
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
def test_fold_accuracy_uses_the_threshold_of_the_other_folds(balanced):
    scores, same, folds = fold_rows()
    found = fold_accuracy(scores, same, folds, balanced)
    rows = list(zip(scores.double().tolist(), same.tolist(), strict=True))
    expected = []
    for fold in range(7):
        others = [row for row, at in zip(rows, folds.tolist(), strict=True) if at != fold]
        inside = [row for row, at in zip(rows, folds.tolist(), strict=True) if at == fold]
        best = max(share_correct(others, threshold, balanced) for threshold in candidates(others))
        assert share_correct(others, found.thresholds[fold], balanced) == pytest.approx(best)
        expected.append(share_correct(inside, found.thresholds[fold], balanced))
    assert found.accuracies == pytest.approx(expected)
    assert found.mean == pytest.approx(statistics.mean(expected))
    assert found.standard_error == pytest.approx(statistics.stdev(expected) / 7**0.5)


def test_scores_of_a_fold_do_not_change_its_threshold():
    scores, same, folds = fold_rows()
    changed = torch.where(folds == 2, -scores, scores)
    found, other = fold_accuracy(scores, same, folds), fold_accuracy(changed, same, folds)
    assert found.thresholds[2] == other.thresholds[2]
    assert found.accuracies[2] != other.accuracies[2]


def test_balanced_accuracy_weights_both_kinds_equally():
    scores, same = torch.tensor([0.9, 0.1, 0.1, 0.1]), torch.tensor([True, True, True, False])
    assert accuracy(scores, same, 0.5) == 0.5
    assert accuracy(scores, same, 0.5, balanced=True) == pytest.approx((1 / 3 + 1) / 2)


def test_lists_are_read_as_float64():
    """0.7 in float32 is less than 0.7 in float64."""
    assert accuracy([0.7, 0.1], [True, False], threshold=0.7) == 1
    assert best_threshold([0.7, 0.1], [True, False]) == 0.4


def test_development_accuracy():
    development = (torch.tensor([0.8, 0.6, 0.4, 0.2]), torch.tensor([True, True, False, False]))
    test = (torch.tensor([0.55, 0.45, 0.35, 0.3]), torch.tensor([True, True, False, False]))
    found = development_accuracy(development, test)
    assert found.threshold == pytest.approx(0.5)
    assert (found.accuracy, found.development_accuracy) == (0.75, 1.0)


def test_accuracies_require_folds_and_both_kinds():
    scores, same = torch.tensor([0.1, 0.2]), torch.tensor([True, True])
    with pytest.raises(ValueError, match=r"folds must be \[2\], one number per pair, not \[3\]"):
        fold_accuracy(scores, same, torch.zeros(3))
    with pytest.raises(ValueError, match="needs two folds or more, not 1"):
        fold_accuracy(scores, same, torch.zeros(2))
    with pytest.raises(ValueError, match="needs pairs of both kinds, not 2 genuine and 0 impostor pairs"):
        best_threshold(scores, same, balanced=True)
    with pytest.raises(ValueError, match="needs pairs of both kinds"):
        accuracy(scores, ~same, 0.1, balanced=True)


@pytest.mark.parametrize("rate", [1e-309, 9e-13])
def test_rates_that_no_pairs_can_measure_are_rejected(rate):
    with pytest.raises(ValueError, match=f"far must be 1e-12 or more, not {rate}"):
        roc([0.9, 0.1], [1, 0]).tar_at_far(rate)


def test_the_smallest_rate_has_a_note():
    found = roc([0.9, 0.1], [1, 0]).tar_at_far(1e-12)
    assert found.note == (
        "1 impostor pairs are too few for a rate of 1e-12: one of them is 1; 1,000,000,000,000 are needed"
    )
