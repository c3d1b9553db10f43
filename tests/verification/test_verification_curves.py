"""ROC, AUC, EER and TAR at a FAR, against plain loops, against scikit-learn, and with many ties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from dcnet.verification import ScoreHistogram, roc, roc_of_histogram, score_histogram

# Few distinct scores, so that there are ties within and between the kinds; and any finite ones.
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
def test_points_are_those_of_the_definition(rows):
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
def test_points_are_those_of_scikit_learn(rows):
    found = curve(rows)
    far, tar, thresholds = roc_curve(*np.array([(same, score) for score, same in rows]).T, drop_intermediate=False)
    assert found.far.tolist() == pytest.approx(far.tolist())
    assert found.tar.tolist() == pytest.approx(tar.tolist())
    assert found.thresholds[1:].tolist() == thresholds[1:].tolist()


@given(pairs)
def test_auc_is_the_share_of_pairs_of_pairs_in_the_right_order(rows):
    genuine, impostor = split(rows)
    wins = sum((a > b) + 0.5 * (a == b) for a in genuine for b in impostor)
    found = curve(rows).auc()
    assert found == pytest.approx(wins / len(genuine) / len(impostor))
    assert found == pytest.approx(roc_auc_score([same for _, same in rows], [score for score, _ in rows]))


@given(pairs)
def test_eer_is_where_the_lines_between_points_cross(rows):
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
    # A function of the far has one value where the curve is vertical, so that its root is only near.
    if len(set(found.far.tolist())) == len(found.far):
        assert found.eer() == pytest.approx(brentq(lambda far: 1 - far - line(far), 0, 1), abs=1e-9)


@given(pairs, st.sampled_from([0.001, 0.1, 0.25, 1 / 3, 0.5, 0.9]))
def test_tar_at_far_is_the_best_that_holds_the_rate(rows, rate):
    genuine, impostor = split(rows)
    found = curve(rows).tar_at_far(rate)
    if len(impostor) * rate < 1 - 1e-12:
        assert (found.tar, found.threshold) == (None, None)
        assert found.note.startswith(f"{len(impostor)} impostor pairs are too few for a rate of {rate:g}")
        return
    assert found.note == ""
    assert share(impostor, found.threshold) <= rate
    assert share(genuine, found.threshold) == found.tar
    lower = [score for score, _ in rows if score < found.threshold]
    assert all(share(impostor, score) > rate for score in lower)


def test_a_rate_that_is_met_exactly_counts():
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
def test_the_curve_of_a_histogram_is_that_of_the_bins(rows, bins):
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


def test_a_fine_histogram_gives_nearly_the_curve_of_all_pairs():
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
    ("scores", "same", "says"),
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
def test_what_has_no_curve_is_said(scores, same, says):
    with pytest.raises(ValueError, match=says):
        roc(torch.tensor(scores), torch.tensor(same))


def test_an_empty_histogram_has_no_curve():
    with pytest.raises(ValueError, match="the histogram is empty"):
        roc_of_histogram(ScoreHistogram(torch.zeros(4).long(), torch.zeros(4).long()))


@pytest.mark.parametrize("far", [0, 1, -0.1, float("nan")])
def test_rates_that_are_none_are_refused(far):
    with pytest.raises(ValueError, match="far must be above 0 and below 1, not"):
        roc(torch.tensor([0.1, 0.2]), torch.tensor([True, False])).tar_at_far(far)
