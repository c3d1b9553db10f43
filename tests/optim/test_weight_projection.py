"""Filters that are brought back to one norm."""

import copy
import math

import pytest
import torch
from filter_networks import BOTH, decoupled, examples, gradients, network, scale_filters
from torch import nn

import dcnet
from dcnet.optim import WeightedGradients, WeightProjection

UNWEIGHTED = ["sphere-cos", "tanh(radius=2.0)-cos", "linear-sqcos", "seg&log-sigmoid"]


def norms(layer):
    return layer.weight.detach().flatten(1).norm(dim=1)


@pytest.mark.parametrize("norm", [1.0, 3.0])
@pytest.mark.parametrize("operator", UNWEIGHTED)
def test_projection_changes_norms_and_not_the_function(operator, norm):
    for eps, tolerance in ((0.0, 1e-12), (1e-4, 1e-2)):
        model, x = network(operator, eps).eval(), examples()
        before, plain = model(x), model[3].weight.detach().clone()
        WeightProjection(model, norm=norm).project_()
        for layer in decoupled(model):
            torch.testing.assert_close(norms(layer), torch.full_like(norms(layer), norm))
        torch.testing.assert_close(model(x), before, rtol=tolerance, atol=tolerance)
        assert torch.equal(model[3].weight, plain)


def test_gradients_after_projection_do_not_depend_on_the_norm_before():
    model, x = network(eps=0.0), examples()
    large = scale_filters(copy.deepcopy(model), 7.0)
    for name in ("0.weight", "1.weight", "4.weight"):
        torch.testing.assert_close(gradients(large, x)[name] * 7, gradients(model, x)[name])
    for either in (model, large):
        WeightProjection(either).project_()
    torch.testing.assert_close(gradients(large, x), gradients(model, x))


def test_projects_at_every_nth_step_and_leaves_the_optimizer_alone():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    gradients(model, examples())
    optimizer.step()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    projection = WeightProjection(model, every=3)
    assert [projection.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)


def test_a_resumed_run_continues_exactly():
    def run(model, projection, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            gradients(model, examples())
            optimizer.step()
            projection.step()

    whole = network()
    first = copy.deepcopy(whole)
    run(whole, WeightProjection(whole, every=5), 7)
    projection = WeightProjection(first, every=5)
    run(first, projection, 3)
    second = copy.deepcopy(first)
    resumed = WeightProjection(second, every=5)
    assert projection.state_dict() == {"count": 3}
    resumed.load_state_dict(projection.state_dict())
    run(second, resumed, 4)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_filters_without_a_norm_are_left_as_they_are(dtype, device):
    layer = dcnet.DecoupledConv2d(2, 6, 3, dtype=dtype, device=device)
    with torch.no_grad():
        layer.weight[0], layer.weight[1], layer.weight[2] = 0.0, 1e-7, math.inf
    WeightProjection(layer).project_()
    assert layer.weight.dtype == dtype
    assert (layer.weight[0] == 0).all()
    assert (layer.weight[2] == math.inf).all()
    torch.testing.assert_close(norms(layer)[[1, 3, 4, 5]].float().cpu(), torch.ones(4), rtol=0.02, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1e-22, 1e-30])
def test_filters_whose_squares_float32_cannot_hold_are_left_as_they_are(size):
    """They would be projected to norms that are wrong, or infinite."""
    layer = dcnet.DecoupledLinear(4, 3)
    nn.init.constant_(layer.weight, size)
    before = layer.weight.detach().clone()
    WeightProjection(layer).project_()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("on", BOTH)
def test_half_precision_rounds_once(on, device):
    layer = dcnet.DecoupledConv2d(2, 6, 3, dtype=torch.bfloat16, device=device)
    exact = copy.deepcopy(layer).double()
    for each in (layer, exact):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        WeightedGradients(each, optimizer, on=on)
        each.weight.grad = torch.ones_like(each.weight)
        optimizer.step()
    torch.testing.assert_close(layer.weight.double(), exact.weight, rtol=0.02, atol=0.01)


def test_channels_last_filters_stay_channels_last():
    layer = dcnet.DecoupledConv2d(4, 6, 3).to(memory_format=torch.channels_last)
    WeightProjection(layer).project_()
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(norms(layer), torch.ones(6))
