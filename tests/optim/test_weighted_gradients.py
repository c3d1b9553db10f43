"""Gradients that do not depend on the norms of filters: Equations 17 and 18, under every optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from filter_networks import BOTH, decoupled, examples, gradients, network, scale_filters, unit
from torch import nn

import dcnet
from dcnet.optim import WeightedGradients


def equation_17(w, x):
    return (unit(x) - unit(w) @ unit(x) * unit(w)) / w.norm()


def finite_differences(w, x, step=1e-6):
    def f(point):
        return unit(point) @ unit(x)

    return torch.stack([(f(w + step * e) - f(w - step * e)) / (2 * step) for e in torch.eye(len(w), dtype=w.dtype)])


def sphere(w):
    layer = dcnet.DecoupledLinear(len(w), 1, bias=False, operator="sphere-cos", eps=0, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(w.unsqueeze(0))
    return layer


@pytest.mark.parametrize("norm", [0.1, 1.0, 10.0])
def test_eq_17_the_gradient_falls_with_the_norm(norm):
    w, x = torch.randn(2, 7, dtype=torch.float64)
    w = norm * unit(w)
    layer = sphere(w)
    layer(x).sum().backward()
    torch.testing.assert_close(equation_17(w, x), finite_differences(w, x), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(layer.weight.grad[0], equation_17(w, x))


@pytest.mark.parametrize("on", BOTH)
@pytest.mark.parametrize("norm", [0.1, 1.0, 10.0])
def test_eq_18_the_weighted_gradient_does_not(norm, on):
    w, x = torch.randn(2, 7, dtype=torch.float64)
    w = norm * unit(w)
    layer = sphere(w)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    WeightedGradients(layer, optimizer, on=on)
    layer(x).sum().backward()
    optimizer.step()
    taken = w - layer.weight.detach()[0]
    torch.testing.assert_close(taken, unit(x) - unit(w) @ unit(x) * unit(w))
    torch.testing.assert_close(taken, norm * finite_differences(w, x), rtol=1e-6, atol=1e-8)


def one_step(make, on, factor=1.0, steps=1):
    """Filters before and after some steps of an optimizer, from filters multiplied by a factor."""
    torch.manual_seed(0)
    model = scale_filters(network(eps=0.0), factor)
    start = copy.deepcopy(model)
    optimizer = make(model.parameters())
    if on:
        WeightedGradients(model, optimizer, on=on)
    for _ in range(steps):
        gradients(model, examples())
        optimizer.step()
    return [(a.weight.detach(), b.weight.detach()) for a, b in zip(decoupled(start), decoupled(model), strict=True)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-20)


def test_under_sgd_the_gradient_and_the_update_are_the_same():
    for (_, first), (_, second) in zip(*(one_step(sgd, on, 3.0, steps=5) for on in BOTH), strict=True):
        torch.testing.assert_close(first, second)


def test_under_adam_a_factor_on_the_gradient_nearly_cancels():
    plain, gradient, update = (one_step(adam, on, 3.0, steps=10) for on in (None, *BOTH))
    for (start, a), (_, b), (_, c) in zip(plain, gradient, update, strict=True):
        assert (b - a).norm() < 0.01 * (a - start).norm()
        assert (c - start).norm() > 0.5 * start.flatten(1).norm(dim=1).min() * (a - start).norm()
    for (start, a), (_, c) in zip(one_step(adam, None, 3.0), one_step(adam, "update", 3.0), strict=True):
        factor = start.flatten(1).norm(dim=1).view(-1, *[1] * (start.dim() - 1))
        torch.testing.assert_close(c - start, factor * (a - start))


def test_under_adam_the_update_turns_filters_by_the_same_angle_at_any_norm():
    def angles(on, factor):
        pairs = [(a.flatten(1), b.flatten(1)) for a, b in one_step(adam, on, factor)]
        return torch.cat([(F.normalize(a) - F.normalize(b)).norm(dim=1) for a, b in pairs])

    torch.testing.assert_close(angles("update", 100.0), angles("update", 1.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(angles("gradient", 100.0) * 100, angles("gradient", 1.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("on", BOTH)
def test_plain_layers_biases_and_constants_step_as_they_did(on):
    steps = []
    for weighted in (False, True):
        torch.manual_seed(0)
        model = network("tanh-cos")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if weighted:
            WeightedGradients(model, optimizer, on=on)
        gradients(model, examples())
        optimizer.step()
        filters = [id(layer.weight) for layer in decoupled(model)]
        steps.append({name: value.detach() for name, value in model.named_parameters() if id(value) not in filters})
    assert {"0.bias", "0.radius", "3.weight", "3.bias", "4.bias"} <= set(steps[0])
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=0)


@pytest.mark.parametrize("on", BOTH)
def test_weighting_twice_is_refused(on):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weighted = WeightedGradients(model, optimizer, on=on)
    with pytest.raises(ValueError, match=r"SGD has weighted gradients already: remove\(\) those first"):
        WeightedGradients(model, optimizer)
    weighted.remove()
    WeightedGradients(model, optimizer)


@pytest.mark.parametrize("on", BOTH)
def test_removed_it_is_gone(on):
    model = network()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(either.parameters()) for either in (model, twin)]
    WeightedGradients(model, optimizers[0], on=on).remove()
    for either, optimizer in zip((model, twin), optimizers, strict=True):
        gradients(either, examples())
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("on", BOTH)
def test_a_filter_of_zeros_still_learns(on):
    layer = dcnet.DecoupledLinear(5, 3, operator="linear-cos")
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    WeightedGradients(layer, optimizer, on=on)
    layer(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    assert layer.weight.isfinite().all()
    assert (layer.weight != 0).all()


@pytest.mark.parametrize(
    "step", [lambda opt, f: opt.step(f), lambda opt, f: opt.step(closure=f)], ids=["at", "by_name"]
)
@pytest.mark.parametrize("on", BOTH)
def test_optimizers_may_compute_the_gradients_themselves(on, step):
    model = network()
    twin = copy.deepcopy(model)
    optimizers = [sgd(either.parameters()) for either in (model, twin)]
    for either, optimizer in zip((model, twin), optimizers, strict=True):
        WeightedGradients(either, optimizer, on=on)
    for _ in range(3):
        gradients(model, examples())
        optimizers[0].step()
        assert step(optimizers[1], lambda: len(gradients(twin, examples()))) == 8
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: an optimizer without hooks, which has another one step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


@pytest.mark.parametrize("on", BOTH)
def test_the_steps_of_an_optimizer_inside_another_are_weighted(on):
    model = network()
    twin = copy.deepcopy(model)
    plain, inside = (sgd(either.parameters()) for either in (model, twin))
    wrapping = Wrapping(inside)
    WeightedGradients(model, plain, on=on)
    weighted = WeightedGradients(twin, wrapping, on=on)
    for either, optimizer in ((model, plain), (twin, wrapping)):
        gradients(either, examples())
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="SGD has weighted gradients already"):
        WeightedGradients(twin, inside)
    weighted.remove()
    assert not inside._optimizer_step_pre_hooks


@pytest.mark.parametrize("on", BOTH)
def test_filters_without_gradient_and_those_of_other_optimizers_are_left_alone(on):
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    WeightedGradients(model, optimizer, on=on)
    start = copy.deepcopy(model.state_dict())
    model(examples()).sum().backward()
    kept = model[4].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[4].weight.grad, kept)
    assert torch.equal(model[0].weight, start["0.weight"])
    assert not torch.equal(model[1].weight, start["1.weight"])
