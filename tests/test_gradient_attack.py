"""Norms of perturbations, and random numbers of attacks and corruptions."""

import math

import pytest
import torch
from helpers.attacks_in_loops import draw
from hypothesis import given
from hypothesis import strategies as st

from dcnet import gradient_attack
from dcnet.gradient_attack import Linf, norms, register
from dcnet.training.step import classification_loss

NORMS = sorted(norms)


def perturbations(count=6, scale=1.0, dtype=torch.float64):
    return scale * torch.randn(count, 2, 3, 3, dtype=dtype)


def sizes(norm, delta):
    rows = delta.flatten(1).tolist()
    if norm == "linf":
        return [max(abs(value) for value in row) for row in rows]
    return [math.sqrt(sum(value * value for value in row)) for row in rows]


@pytest.mark.parametrize("norm", NORMS)
def test_size_of_perturbations(norm, device):
    delta = perturbations()
    assert norms[norm].size(delta.to(device)).tolist() == pytest.approx(sizes(norm, delta))


@pytest.mark.parametrize("norm", NORMS)
@given(st.just(0.0) | st.floats(1e-6, 3), st.integers(0, 1000))
def test_projection_is_the_nearest_point_of_the_ball(norm, epsilon, seed):
    torch.manual_seed(seed)
    delta = perturbations(scale=0.5)
    delta[0] = 0
    found = norms[norm].project(delta, epsilon)
    assert norms[norm].size(found).max() <= epsilon * (1 + 1e-12)
    inside = norms[norm].size(delta) <= epsilon
    assert torch.equal(found[inside], delta[inside])
    torch.testing.assert_close(norms[norm].project(found, epsilon), found)
    # The nearest point of a convex set: all others lie on the far side of its tangent plane.
    others = norms[norm].sample_ball(delta, torch.arange(len(delta)), seed) * epsilon
    assert ((delta - found) * (others - found)).flatten(1).sum(1).max() <= 1e-9


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_steepest_is_the_best_direction_of_size_one(norm, scale):
    gradient = perturbations(scale=scale, dtype=torch.float32)
    found = norms[norm].steepest(gradient)
    assert norms[norm].size(found).tolist() == pytest.approx([1.0] * 6)
    gain = (found * (gradient / scale)).flatten(1).sum(1)
    for seed in range(20):
        other = norms[norm].sample_ball(gradient, torch.arange(6), seed)
        assert ((other * (gradient / scale)).flatten(1).sum(1) <= gain + 1e-5).all()
    dual = (gradient / scale).flatten(1).norm({"linf": 1, "l2": 2}[norm], dim=1)
    torch.testing.assert_close(gain, dual)


@pytest.mark.parametrize("norm", NORMS)
def test_steepest_direction_of_a_zero_gradient_is_zero(norm):
    assert torch.equal(norms[norm].steepest(torch.zeros(2, 3, 4, 4)), torch.zeros(2, 3, 4, 4))


def test_register_rejects_a_taken_name():
    with pytest.raises(ValueError, match="'linf' is taken: Linf is a norm of that name"):
        register(Linf)


def test_uniform_matches_splitmix64(device):
    seeds, rows = (0, 1, 12345678901234567, 2**63 - 1), torch.tensor([0, 5, 1_000_000])
    for seed in seeds:
        expected = [[draw(seed, row, pixel, 6) for pixel in range(6)] for row in rows.tolist()]
        found = gradient_attack.uniform(seed, rows.to(device), (2, 3))
        assert found.shape == (3, 2, 3)
        assert found.flatten(1).tolist() == expected


def test_uniform_draws_are_uniform_and_uncorrelated():
    found = gradient_attack.uniform(3, torch.arange(1000), (100,))
    assert 0 < found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    counts = torch.histc(found, 20, 0, 1)
    # Chi squared with 19 degrees of freedom exceeds 43.8 once in a thousand.
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
    others = [gradient_attack.uniform(4, torch.arange(1000), (100,)), found.roll(1, 0), found.roll(1, 1)]
    for other in others:
        assert torch.corrcoef(torch.stack([found.flatten(), other.flatten()]))[0, 1].abs() < 0.015


def test_normal_draws_have_a_normal_distribution():
    found = gradient_attack.normal(5, torch.arange(400), (250,)).double()
    assert found.isfinite().all()
    assert found.mean().item() == pytest.approx(0, abs=0.015)
    assert found.std().item() == pytest.approx(1, abs=0.01)
    # The share within one and two deviations.
    assert (found.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.006)
    assert (found.abs() < 2).double().mean().item() == pytest.approx(0.9545, abs=0.003)


def test_each_seed_from_a_generator_differs():
    generator = torch.Generator().manual_seed(0)
    first, second = gradient_attack.as_seed(generator), gradient_attack.as_seed(generator)
    assert first != second
    assert gradient_attack.as_seed(torch.Generator().manual_seed(0)) == first
    assert gradient_attack.as_seed(17) == 17


@pytest.mark.parametrize("seed", [-1, 1 << 63, 0.5, "1", True])
def test_as_seed_rejects_invalid_seeds(seed):
    with pytest.raises(ValueError, match="seed must be a whole number from 0"):
        gradient_attack.as_seed(seed)


def test_the_floored_loss_by_its_formula():
    """The loss of training, for each image, with its gradient."""
    torch.manual_seed(0)
    logits, labels = (4 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_(), torch.randint(7, (5,))
    found = gradient_attack.LOSSES["floored"](logits, labels)
    expected = []
    for row, label in zip(logits, labels, strict=True):
        chances = row.exp() / row.exp().sum()
        smoothed = [0.01 / 7 + (0.99 if j == label else 0.0) for j in range(7)]
        expected.append(-sum(share * torch.log(chances[j] + 1e-4) for j, share in enumerate(smoothed)))
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(found.mean(), classification_loss(logits.float(), labels, 0.01, 1e-4).double())
    (own,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    torch.testing.assert_close(own, torch.autograd.grad(sum(expected), logits)[0])
