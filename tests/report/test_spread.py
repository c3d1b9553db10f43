"""Angles within and between classes, and the angular Fisher score, against loops."""

import math

import pytest
import torch

from dcnet.report.spread import spread_of, target_angle


def direction(points):
    total = [sum(values) for values in zip(*points, strict=True)]
    size = math.sqrt(sum(value * value for value in total))
    return [value / size for value in total]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_angles_and_scores_in_loops():
    torch.manual_seed(0)
    points, labels = torch.randn(30, 3) + 2 * torch.eye(3).repeat(10, 1), torch.arange(30) % 3
    unit = [direction([row]) for row in points.tolist()]
    means = {c: direction([u for u, label in zip(unit, labels.tolist(), strict=True) if label == c]) for c in range(3)}
    own = [cosine(u, means[label]) for u, label in zip(unit, labels.tolist(), strict=True)]
    angles = {a: [math.degrees(math.acos(cosine(means[a], means[b]))) for b in range(3) if b != a] for a in range(3)}
    middle = direction(unit)
    fisher = sum(1 - c for c in own) / sum(10 * (1 - cosine(means[c], middle)) for c in range(3))
    found = spread_of(points, labels)
    assert found.within == pytest.approx(sum(math.degrees(math.acos(c)) for c in own) / 30, rel=1e-5)
    assert found.between == pytest.approx(sum(sum(row) for row in angles.values()) / 6, rel=1e-5)
    assert found.nearest == pytest.approx(sum(min(row) for row in angles.values()) / 3, rel=1e-5)
    assert found.nearest < found.between
    assert found.fisher == pytest.approx(fisher, rel=1e-4)


def test_labels_need_not_be_all_there():
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    found = spread_of(points, torch.tensor([2, 2, 7]))
    assert (found.within, found.between, found.nearest) == pytest.approx((0, 90, 90), abs=1e-4)


def test_one_class_has_nothing_between():
    found = spread_of(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([3, 3]))
    assert found.within == pytest.approx(22.5)
    assert math.isnan(found.between)


def test_angles_to_the_weights_of_the_own_class():
    points, directions = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 5.0], [1.0, 1.0]])
    assert target_angle(points, torch.tensor([1, 0]), directions) == pytest.approx((45 + 0) / 2)


def test_norms_do_not_count():
    torch.manual_seed(0)
    points, labels = torch.randn(20, 2), torch.arange(20) % 2
    longer = points * torch.rand(20, 1).add(0.5)
    assert spread_of(longer, labels).fisher == pytest.approx(spread_of(points, labels).fisher, rel=1e-5)
