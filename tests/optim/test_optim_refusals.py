"""What the tricks refuse, in one sentence."""

import copy

import pytest
import torch
from filter_networks import gradients, network
from torch import nn

import dcnet
from dcnet.models import create_model
from dcnet.optim import WeightedGradients, WeightProjection, param_groups


def make_either(kind, model, **options):
    if kind == "projection":
        return WeightProjection(model, **options)
    return WeightedGradients(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_weighted_operators_are_refused_by_name(kind):
    model = create_model("cnn9", "ball-cos+linear", width=0.1, classifier="normalized")
    with pytest.raises(
        ValueError, match=r"layer 'body.conv1.layer1.conv' has the weighted operator 'ball-cos\+linear'"
    ):
        make_either(kind, model)
    before = copy.deepcopy(model.state_dict())
    chosen = make_either(kind, model, layers=lambda name, layer: not layer.operator.weighted)
    if kind == "projection":
        chosen.project_()
        changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        assert changed == ["classifier.weight"]


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_layers_that_blend_are_refused_and_decay(kind):
    layer = dcnet.DecoupledConv2d(2, 4, 3, blend=0.5)
    with pytest.raises(ValueError, match="blends with the plain layer, in which"):
        make_either(kind, layer)
    assert any(value is layer.weight for value in param_groups(layer, 0.1)[0]["params"])


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_models_without_filters_to_work_on_are_refused(kind):
    with pytest.raises(ValueError, match="no decoupled layer to work on"):
        make_either(kind, create_model("cnn9", "conv", width=0.1))
    with pytest.raises(ValueError, match="`layers` chose none"):
        make_either(kind, network(), layers=lambda name, layer: False)
    layer = dcnet.DecoupledLinear(4, 3)
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match="the weight of layer '0' is computed from others"):
        make_either(kind, nn.Sequential(layer))


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_a_weight_shared_with_a_layer_that_needs_its_norm_is_refused(kind):
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layer '0' shares its weight with '1', in which \|\|w\|\| matters"):
        make_either(kind, model)


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_a_weight_shared_with_a_weighted_layer_that_was_taken_out_is_refused(kind):
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), dcnet.DecoupledLinear(4, 4, operator="tanh-cos+linear"))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layer '0' shares its weight with '1', in which \|\|w\|\| matters"):
        make_either(kind, model, layers=lambda name, layer: not layer.operator.weighted)


def test_a_weight_that_decoupled_layers_share_is_weighted_once():
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4, eps=0.0), dcnet.DecoupledLinear(4, 4, eps=0.0)).double()
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    WeightedGradients(model, optimizer)
    start, grad = model[0].weight.detach().clone(), gradients(model, torch.randn(3, 4).double())["0.weight"]
    optimizer.step()
    torch.testing.assert_close(start - model[0].weight, grad * start.norm(dim=1, keepdim=True))


def test_wrong_arguments_are_refused_in_one_sentence():
    model = network()
    for every in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"whole number of steps, 1 or more, not {every}"):
            WeightProjection(model, every=every)
    with pytest.raises(ValueError, match="norm must be positive, not 0"):
        WeightProjection(model, norm=0)
    with pytest.raises(ValueError, match="'gradient' or 'update', not 'step'"):
        make_either("gradients", model, on="step")
    with pytest.raises(ValueError, match="the SGD has none of the filters"):
        WeightedGradients(model, torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"weight_decay must not be negative, not -0.1"):
        param_groups(model, weight_decay=-0.1)
