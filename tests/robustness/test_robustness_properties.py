"""What every attack of the registry keeps to, whatever it is asked."""

import copy

import pytest
import torch
from attacked_networks import SHAPE, answers, attacked, images, linear, smooth, with_everything
from hypothesis import given, settings
from hypothesis import strategies as st

from dcnet.robustness import attacks, norms
from dcnet.robustness.attack import registry

# Of attacks that ask thousands of times, a few are enough to see what they keep to.
QUICK = {"autoattack": {"parts": ("apgd-ce", "square"), "queries": 4}, "square": {"queries": 4}, "pgd": {"steps": 5}}
NAMES = st.sampled_from(sorted(registry))
NORMS = st.sampled_from(sorted(norms))
GRADIENT = ["fgsm", "bim", "pgd"]


def run(name, model, x, y, epsilon, **options):
    return getattr(attacks, name)(model, x, y, epsilon=epsilon, **{**QUICK.get(name, {}), **options})


@settings(max_examples=80)
@given(NAMES, NORMS, st.floats(0, 1), st.integers(1, 9), st.integers(0, 2**63 - 1), st.booleans())
def test_the_budget_and_the_range_of_pixels_are_kept(name, norm, share, count, seed, single):
    model, x = smooth(), images(count, seed % 1000)
    # Pixels at both ends, where a perturbation has only one way to go.
    x = torch.where(x < 0.1, 0, torch.where(x > 0.9, 1, x))
    y = answers(model, x)
    if single:
        model, x = model.float(), x.float()
    epsilon = share**3 * norms[norm].largest(x[0].numel())
    found = run(name, model, x, y, epsilon, norm=norm, seed=seed, batch_size=4)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert not found.requires_grad
    assert found.min() >= 0
    assert found.max() <= 1
    assert norms[norm].size(found - x).max() <= epsilon * (1 + 1e-6) + 1e-6


@settings(max_examples=30)
@given(NAMES, NORMS, st.integers(0, 100))
def test_no_budget_is_no_change(name, norm, seed):
    model, x, y = attacked(4)
    assert torch.equal(run(name, model, x, y, 0, norm=norm, seed=seed), x)


@settings(max_examples=30)
@given(st.sampled_from(sorted(set(registry) - {"fgsm"})), NORMS, st.lists(st.floats(0, 0.3), min_size=2, max_size=4))
def test_a_larger_budget_is_never_weaker(name, norm, epsilons):
    model, x, y = attacked(8)
    found = attacks.curve(model, x, y, attack=name, epsilons=epsilons, norm=norm, **QUICK.get(name, {}))
    falling = [accuracy for _, accuracy in sorted(zip(epsilons, found, strict=True), key=lambda point: point[0])]
    assert falling == sorted(falling, reverse=True)
    assert all(accuracy == 1 for epsilon, accuracy in zip(epsilons, found, strict=True) if epsilon == 0)


@settings(max_examples=20)
@given(NAMES, NORMS, st.integers(0, 2**63 - 1))
def test_the_same_seed_finds_the_same_images(name, norm, seed):
    model, x, y = attacked(6)
    before = torch.get_rng_state()
    first, second = (run(name, model, x, y, 0.05, norm=norm, seed=seed) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", sorted(registry))
@pytest.mark.parametrize("source", [False, True])
def test_the_network_is_left_as_it_was(name, source):
    model, x = with_everything().train(), torch.rand(6, *SHAPE)
    model[1].eval()
    model(x).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    wanted, modes = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    y = answers(copy.deepcopy(model).eval(), x)
    network = {"source": model} if source else {}
    run(name, copy.deepcopy(model) if source else model, x, y, 0.1, **network)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    for parameter, before in zip(model.parameters(), gradients, strict=True):
        assert before is None if parameter.grad is None else torch.equal(parameter.grad, before)


@pytest.mark.parametrize("name", GRADIENT)
def test_the_size_of_a_batch_does_not_matter(name):
    model, x, y = attacked(11)
    expected = run(name, model, x, y, 0.1, batch_size=11)
    for size in (1, 4, 10, 100):
        torch.testing.assert_close(run(name, model, x, y, 0.1, batch_size=size), expected, rtol=0, atol=1e-9)


def linear_task(classes, norm):
    """A linear network, images away from the ends of the range, and for each the distance to the nearest other class.

    That is the difference of logits over the dual norm of the difference of weights, in plain loops.
    """
    model = linear((1.0, 2.0, 3.0, 0.5)[:classes])
    x = 0.5 + 0.3 * (images(40) - 0.5)
    y = answers(model, x)
    weight, logits = model[1].weight.detach(), model(x).detach()
    nearest = []
    for image in range(40):
        own = int(y[image])
        others = [other for other in range(classes) if other != own]
        apart = [(weight[own] - weight[other]).norm({"linf": 1, "l2": 2}[norm]) for other in others]
        gaps = [logits[image, own] - logits[image, other] for other in others]
        nearest.append(min(float(gap / size) for gap, size in zip(gaps, apart, strict=True)))
    return model, x, y, nearest


def budget_between(nearest, rank):
    """An epsilon that breaks exactly so many images, with a gap of a few percent around it."""
    ordered = sorted(nearest)
    gaps = {at: ordered[at] / ordered[at - 1] for at in range(rank - 3, rank + 4)}
    count = max(gaps, key=gaps.__getitem__)
    return (ordered[count - 1] * ordered[count]) ** 0.5, count / 40


@pytest.mark.parametrize("norm", sorted(norms))
@pytest.mark.parametrize("rank", [10, 30])
@pytest.mark.parametrize("name", GRADIENT)
def test_two_linear_classes_break_exactly_where_theory_says(name, rank, norm):
    model, x, y, nearest = linear_task(2, norm)
    epsilon, expected = budget_between(nearest, rank)
    options = {"steps": 30, "step": epsilon / 2} if name == "pgd" else {}
    found = run(name, model, x, y, epsilon, norm=norm, **options)
    assert 1 - attacks.accuracy(model, found, y) == pytest.approx(expected)


@pytest.mark.parametrize("norm", sorted(norms))
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_linear_classes_break_exactly_where_theory_says_if_each_is_aimed_at(classes, norm):
    model, x, y, nearest = linear_task(classes, norm)
    epsilon, expected = budget_between(nearest, 20)
    left = torch.ones(40, dtype=torch.bool)
    for away in range(1, classes):
        targets = (y + away) % classes
        options = {"steps": 30, "step": epsilon / 2, "loss": "margin", "targets": targets}
        left &= attacks.correct(model, attacks.pgd(model, x, y, epsilon=epsilon, norm=norm, **options), y)
    assert 1 - left.double().mean().item() == pytest.approx(expected)
    # FAB goes 5 % beyond the border, and the gradient of a cross entropy looks at all classes at once.
    found = attacks.autoattack(model, x, y, epsilon=epsilon, norm=norm, parts=("apgd-ce", "apgd-t"))
    reached = 1 - attacks.accuracy(model, found, y)
    assert reached <= expected + 1e-9
    assert reached == pytest.approx(expected) or classes == 3
