"""Diagnosis of features: numbers, text and advice, and inputs without a diagnosis."""

import dataclasses
import math

import pytest
import torch
from helpers.heads_and_batches import head_and_batch

from dcnet.losses import ASoftmax, Diagnosis, MarginSoftmax, ShardedMarginSoftmax


def test_values_and_text_of_a_diagnosis():
    head = MarginSoftmax(2, 2, ASoftmax(m=2), annealing=None)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    degrees = torch.tensor([5.0, 21.0, 35.0, 44.0, 81.0])
    x = torch.stack([torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()], 1)
    found = head.diagnose(x, torch.zeros(5, dtype=torch.int64))
    assert found.mean_angle == pytest.approx(degrees.mean().item(), abs=1e-3)
    assert found.median_angle == pytest.approx(35, abs=1e-3)
    assert found.histogram[:9] == (1, 0, 1, 1, 1, 0, 0, 0, 1)
    assert found.effective_m == pytest.approx(2, abs=1e-3)
    assert found.right == pytest.approx(0.8)
    # 2 * 35 > 90 - 35 and 2 * 44 > 90 - 44, but 2 * 21 < 90 - 21.
    assert found.inside == pytest.approx(0.4)
    assert "inside the margin" in str(found)
    assert dataclasses.asdict(found)["used"] == 1.0


def test_effective_multiples_beyond_half_a_turn():
    for degrees, m in ((60, 4), (20, 4), (89, 3)):
        head = MarginSoftmax(2, 2, ASoftmax(m=m), annealing=None)
        with torch.no_grad():
            head.weight.copy_(torch.eye(2))
        theta = math.radians(degrees)
        found = head.diagnose(torch.tensor([[math.cos(theta), math.sin(theta)]]), torch.tensor([0]))
        assert found.effective_m == pytest.approx(m, rel=1e-3)


@pytest.mark.parametrize("kind", [MarginSoftmax, ShardedMarginSoftmax])
def test_an_empty_batch_has_no_diagnosis(kind: type[MarginSoftmax]):
    with pytest.raises(ValueError, match=r"an empty batch has no angles to diagnose: give the features of one sample"):
        kind(3, 4).diagnose(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_not_finite_have_no_diagnosis(value: float):
    head, x, labels = head_and_batch("a-softmax")
    x[3, 1] = value
    with pytest.raises(ValueError, match="sample 3 has no angles: its features or the weights of the head are not"):
        head.diagnose(x, labels)


def two_classes(degrees: list[float], margin: str = "a-softmax(m=2)") -> Diagnosis:
    """Features at these angles to their class, and at 90 degrees minus the angle to the other class."""
    head = MarginSoftmax(2, 2, margin, annealing=None)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    theta = torch.deg2rad(torch.tensor(degrees))
    return head.diagnose(torch.stack([theta.cos(), theta.sin()], 1), torch.zeros(len(degrees), dtype=torch.int64))


@pytest.mark.parametrize(
    ("degrees", "margin"), [([60.0, 70.0, 50.0], "a-softmax(m=2)"), ([10.0, 60.0, 20.0], "softmax")], ids=str
)
def test_samples_nearer_to_another_class_do_not_satisfy_the_margin(degrees: list[float], margin: str):
    found = two_classes(degrees, margin)
    assert found.inside == 0
    assert found.advice == "The margin is effective."


def test_correct_samples_inside_the_margin_do_not_satisfy_it():
    found = two_classes([5.0, 35.0, 44.0])
    assert (found.right, found.inside) == (1, pytest.approx(2 / 3))
    assert found.advice == "The margin is effective."


def test_advice_if_features_do_not_point_to_their_class():
    assert two_classes([85.0, 81.0, 5.0]).advice.startswith("Features do not point to their class yet: train longer")


def test_advice_if_all_samples_satisfy_the_margin():
    assert two_classes([5.0, 10.0, 20.0]).advice == ("Nearly all samples satisfy the margin: try a larger one.")


def test_features_along_the_weights_have_an_angle_of_zero():
    """In float32 some cosines are slightly beyond 1 or -1, where there is no angle."""
    torch.manual_seed(0)
    head = MarginSoftmax(7, 300, "arcface")
    weight, labels = head.weight.detach(), torch.arange(300)
    assert head.cosines(weight).max() > 1
    assert head.diagnose(weight, labels).mean_angle < 0.1
    assert head.diagnose(-weight, labels).mean_angle > 179.9
