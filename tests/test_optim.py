"""Weight projection, weighted gradients and parameter groups."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.filter_networks import BOTH, decoupled, examples, gradients, network, scale_filters, unit
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import dcnet
from dcnet.models import create_model
from dcnet.optim import WeightedGradients, WeightProjection, param_groups

UNWEIGHTED = ["sphere-cos", "tanh(radius=2.0)-cos", "linear-sqcos", "seg&log-sigmoid"]


def norms(layer):
    return layer.weight.detach().flatten(1).norm(dim=1)


@pytest.mark.parametrize("norm", [1.0, 3.0])
@pytest.mark.parametrize("operator", UNWEIGHTED)
def test_projection_changes_norms_but_not_outputs(operator, norm):
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


def test_projects_at_every_nth_step_and_keeps_the_optimizer_state():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    gradients(model, examples())
    optimizer.step()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    projection = WeightProjection(model, every=3)
    assert [projection.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)


def test_resumed_projection_continues_exactly():
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
def test_zero_and_infinite_filters_are_not_projected(dtype, device):
    layer = dcnet.DecoupledConv2d(2, 6, 3, dtype=dtype, device=device)
    with torch.no_grad():
        layer.weight[0], layer.weight[1], layer.weight[2] = 0.0, 1e-7, math.inf
    WeightProjection(layer).project_()
    assert layer.weight.dtype == dtype
    assert (layer.weight[0] == 0).all()
    assert (layer.weight[2] == math.inf).all()
    torch.testing.assert_close(norms(layer)[[1, 3, 4, 5]].float().cpu(), torch.ones(4), rtol=0.02, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1e-22, 1e-30])
def test_filters_whose_squares_underflow_are_not_projected(size):
    """Their projections would have wrong or infinite norms."""
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
def test_eq_17_gradient_is_inversely_proportional_to_the_norm(norm):
    w, x = torch.randn(2, 7, dtype=torch.float64)
    w = norm * unit(w)
    layer = sphere(w)
    layer(x).sum().backward()
    torch.testing.assert_close(equation_17(w, x), finite_differences(w, x), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(layer.weight.grad[0], equation_17(w, x))


@pytest.mark.parametrize("on", BOTH)
@pytest.mark.parametrize("norm", [0.1, 1.0, 10.0])
def test_eq_18_weighted_gradient_does_not_depend_on_the_norm(norm, on):
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
    """Filters before and after some steps of an optimizer, with initial filters scaled by a factor."""
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


def test_weighting_gradients_or_updates_is_the_same_with_sgd():
    for (_, first), (_, second) in zip(*(one_step(sgd, on, 3.0, steps=5) for on in BOTH), strict=True):
        torch.testing.assert_close(first, second)


def test_weighting_gradients_has_little_effect_with_adam():
    plain, gradient, update = (one_step(adam, on, 3.0, steps=10) for on in (None, *BOTH))
    for (start, a), (_, b), (_, c) in zip(plain, gradient, update, strict=True):
        assert (b - a).norm() < 0.01 * (a - start).norm()
        assert (c - start).norm() > 0.5 * start.flatten(1).norm(dim=1).min() * (a - start).norm()
    for (start, a), (_, c) in zip(one_step(adam, None, 3.0), one_step(adam, "update", 3.0), strict=True):
        factor = start.flatten(1).norm(dim=1).view(-1, *[1] * (start.dim() - 1))
        torch.testing.assert_close(c - start, factor * (a - start))


def test_weighted_updates_of_adam_rotate_filters_by_the_same_angle_at_any_norm():
    def angles(on, factor):
        pairs = [(a.flatten(1), b.flatten(1)) for a, b in one_step(adam, on, factor)]
        return torch.cat([(F.normalize(a) - F.normalize(b)).norm(dim=1) for a, b in pairs])

    torch.testing.assert_close(angles("update", 100.0), angles("update", 1.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(angles("gradient", 100.0) * 100, angles("gradient", 1.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("on", BOTH)
def test_other_parameters_are_not_weighted(on):
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
def test_weighting_twice_is_rejected(on):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weighted = WeightedGradients(model, optimizer, on=on)
    with pytest.raises(ValueError, match=r"SGD has weighted gradients already: remove\(\) those first"):
        WeightedGradients(model, optimizer)
    weighted.remove()
    WeightedGradients(model, optimizer)


@pytest.mark.parametrize("on", BOTH)
def test_remove_removes_the_hooks(on):
    model = network()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(either.parameters()) for either in (model, twin)]
    WeightedGradients(model, optimizers[0], on=on).remove()
    for either, optimizer in zip((model, twin), optimizers, strict=True):
        gradients(either, examples())
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("on", BOTH)
def test_zero_filter_still_learns(on):
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
def test_optimizers_with_a_closure(on, step):
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
    """An optimizer without hooks that wraps another one, as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


@pytest.mark.parametrize("on", BOTH)
def test_wrapped_optimizer_is_weighted(on):
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
def test_frozen_filters_and_those_of_other_optimizers_are_not_changed(on):
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


def names_of(model):
    decayed, kept = param_groups(model, weight_decay=5e-4, named=True)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (5e-4, 0.0)
    names = [*decayed["param_names"], *kept["param_names"]]
    values = [*decayed["params"], *kept["params"]]
    found = {name: id(value) for name, value in zip(names, values, strict=True)}
    assert len(names) == len(found)
    assert found == {name: id(value) for name, value in model.named_parameters()}
    return [decayed["param_names"], kept["param_names"]]


def test_decayed_parameters_of_a_resnet():
    decayed, kept = names_of(create_model("resnet32", "tanh-sigmoid(learnable=True)", width=0.05))
    units = [f"body.conv{stage}.unit{i}" for stage in (1, 2, 3) for i in (1, 2, 3, 4, 5)]
    convs = ["body.conv0", *(f"{unit}.{half}" for unit in units for half in ("first", "second"))]
    shortcuts = ["body.conv2.unit1.shortcut", "body.conv3.unit1.shortcut"]
    assert set(kept) == {f"{conv}.conv.{value}" for conv in convs for value in ("weight", "radius", "k")}
    batch_norms = {f"{layer}.norm.{value}" for layer in (*convs, *shortcuts) for value in ("weight", "bias")}
    assert set(decayed) == {f"{layer}.conv.weight" for layer in shortcuts} | batch_norms | {"classifier.weight"}


def test_decayed_parameters_of_other_networks():
    weighted, kept = names_of(create_model("resnet32", "tanh-cos+linear", width=0.05))
    assert {name.rpartition(".")[2] for name in kept} == {"radius"}
    assert "body.conv0.conv.weight" in weighted
    _, kept = names_of(create_model("resnet18-modified", "conv", width=0.02, classifier="normalized"))
    assert [name for name in kept if "activation" not in name] == ["classifier.weight"]
    assert "body.conv0.activation.weight" in kept
    decayed, kept = names_of(network())
    assert decayed == ["0.bias", "1.bias", "3.weight", "3.bias", "4.bias"]
    assert kept == ["0.weight", "1.weight", "4.weight"]
    assert names_of(nn.Linear(3, 2)) == [["weight", "bias"], []]


def test_weighted_filters_do_not_decay_if_asked():
    model = create_model("resnet32", "tanh-cos+linear", width=0.05)
    unweighted = create_model("resnet32", "tanh-cos", width=0.05)
    groups = param_groups(model, 5e-4, named=True, weighted=False)
    assert [group["param_names"] for group in groups] == names_of(unweighted)


def test_learned_scale_of_a_head_does_not_decay():
    """It is stored as its logarithm; decay would pull the scale to 1, where classes can hardly be separated."""
    assert names_of(dcnet.losses.MarginSoftmax(4, 3, scale="learned")) == [["weight"], ["scale.log"]]
    assert names_of(dcnet.losses.MarginSoftmax(4, 3, scale=16.0)) == [["weight"], []]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_pruned_and_weight_normed_filters_decay_only_if_weighted():
    model = nn.Sequential(
        *(
            dcnet.DecoupledLinear(3, 3, bias=False, operator=f"log-cos{ending}")
            for ending in ("", "+linear", "", "+linear")
        )
    )
    for layer in model[:2]:
        prune.random_unstructured(layer, "weight", 0.5)
    for layer in model[2:]:
        nn.utils.weight_norm(layer)
    assert names_of(model) == [
        ["1.weight_orig", "3.weight_g", "3.weight_v"],
        ["0.weight_orig", "2.weight_g", "2.weight_v"],
    ]


def test_shared_parameters_are_in_one_group_and_decay_if_they_do_in_any_layer():
    model = nn.Sequential(*[dcnet.DecoupledLinear(4, 4, operator="linear-cos", bias=False) for _ in range(3)])
    model[1].weight = model[0].weight
    assert names_of(model) == [[], ["0.weight", "2.weight"]]
    model.append(nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight
    assert names_of(model) == [["2.weight"], ["0.weight"]]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("build", [network, lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 2)).double()])
def test_groups_work_with_torchs_optimizers(make, named, build):
    model = build()
    optimizer = make(param_groups(model, weight_decay=0.1, named=named), lr=0.01)
    gradients(model, examples())
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    make(param_groups(model, weight_decay=0.1, named=named), lr=0.01).load_state_dict(optimizer.state_dict())


def make_either(kind, model, **options):
    if kind == "projection":
        return WeightProjection(model, **options)
    return WeightedGradients(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_weighted_operators_are_rejected_with_the_layer_name(kind):
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
def test_blended_layers_are_rejected_and_decay(kind):
    layer = dcnet.DecoupledConv2d(2, 4, 3, blend=0.5)
    with pytest.raises(ValueError, match="blends with the plain layer, which"):
        make_either(kind, layer)
    assert any(value is layer.weight for value in param_groups(layer, 0.1)[0]["params"])


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_models_without_decoupled_layers_are_rejected(kind):
    with pytest.raises(ValueError, match="no decoupled layer is selected"):
        make_either(kind, create_model("cnn9", "conv", width=0.1))
    with pytest.raises(ValueError, match="`layers` selects none"):
        make_either(kind, network(), layers=lambda name, layer: False)
    layer = dcnet.DecoupledLinear(4, 3)
    weight_norm(layer)
    with pytest.raises(ValueError, match="the weight of layer '0' must be a parameter"):
        make_either(kind, nn.Sequential(layer))


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_weight_shared_with_a_plain_layer_is_rejected(kind):
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layer '0' shares its weight with '1', which depends on \|\|w\|\|"):
        make_either(kind, model)


@pytest.mark.parametrize("kind", ["projection", "gradients"])
def test_weight_shared_with_an_excluded_weighted_layer_is_rejected(kind):
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), dcnet.DecoupledLinear(4, 4, operator="tanh-cos+linear"))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layer '0' shares its weight with '1', which depends on \|\|w\|\|"):
        make_either(kind, model, layers=lambda name, layer: not layer.operator.weighted)


def test_weight_shared_by_decoupled_layers_is_weighted_once():
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4, eps=0.0), dcnet.DecoupledLinear(4, 4, eps=0.0)).double()
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    WeightedGradients(model, optimizer)
    start, grad = model[0].weight.detach().clone(), gradients(model, torch.randn(3, 4).double())["0.weight"]
    optimizer.step()
    torch.testing.assert_close(start - model[0].weight, grad * start.norm(dim=1, keepdim=True))


def test_invalid_arguments_are_rejected():
    model = network()
    for every in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"whole number, 1 or more, not {every}"):
            WeightProjection(model, every=every)
    with pytest.raises(ValueError, match="norm must be positive, not 0"):
        WeightProjection(model, norm=0)
    with pytest.raises(ValueError, match="'gradient' or 'update', not 'step'"):
        make_either("gradients", model, on="step")
    with pytest.raises(ValueError, match="the SGD has none of the filters"):
        WeightedGradients(model, torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"weight_decay must not be negative, not -0.1"):
        param_groups(model, weight_decay=-0.1)


def test_parametrized_filters_do_not_decay():
    model = nn.Sequential(weight_norm(dcnet.DecoupledLinear(4, 3, operator="tanh-cos")), weight_norm(nn.Linear(3, 2)))
    decaying, others = (group["param_names"] for group in dcnet.optim.param_groups(model, 0.1, named=True))
    assert {name for name in others if "parametrizations" in name} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }
    assert "1.parametrizations.weight.original1" in decaying
