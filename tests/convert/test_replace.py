"""Conversion of networks to decoupled ones with the same weights, and back."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import dcnet
from dcnet.convert import Choice, decouple, plan, recouple
from dcnet.layers import Decoupled
from dcnet.norms import Processes


class Block(nn.Module):
    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.depth = nn.Conv2d(out, out, 3, padding=1, groups=out)
        self.point = nn.Conv2d(out, out, 1)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.point(self.depth(self.conv1(x).relu())) + self.downsample(x))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        Block(8, 8),
        Block(8, 12, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def decoupled_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, Decoupled)}


FIRST, LAST = {"0"}, {"5"}
SHORTCUTS = {"1.downsample.0", "2.downsample.0"}
DEPTHWISE = {"1.depth", "2.depth"}
OTHERS = {"1.conv1", "1.point", "2.conv1", "2.point"}
CONVOLUTIONS = FIRST | SHORTCUTS | DEPTHWISE | OTHERS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, CONVOLUTIONS),
        ({"linear": True}, CONVOLUTIONS | LAST),
        ({"linear": True, "last": False}, CONVOLUTIONS),
        ({"last": False}, CONVOLUTIONS),
        ({"first": False}, CONVOLUTIONS - FIRST),
        ({"shortcuts": False}, CONVOLUTIONS - SHORTCUTS),
        ({"depthwise": False}, CONVOLUTIONS - DEPTHWISE),
        ({"include": "*.conv1"}, {"1.conv1", "2.conv1"}),
        ({"include": ["0", "1.*"], "exclude": "*.depth"}, {"0", "1.conv1", "1.point", "1.downsample.0"}),
        ({"where": lambda name, module: module.kernel_size == (3, 3) and "2" in name}, {"2.conv1", "2.depth"}),
    ],
)
def test_layers_are_chosen(options, expected):
    model = decouple(network(), "tanh-cos", **options)
    assert decoupled_names(model) == expected
    assert set(plan(network(), "tanh-cos", Choice(**options)).changed) == expected
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(value.grad.isfinite().all() for value in model.parameters())


def test_a_last_convolution_counts_as_the_last_layer():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1))
    assert decoupled_names(decouple(model, "tanh-cos", first=False, last=False)) == {"1"}


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_rejected(option):
    with pytest.raises(ValueError, match=r"pattern 'layer9\.\*' matches no layer.*'0', '1.conv1'"):
        decouple(network(), "tanh-cos", **{option: ["0", "layer9.*"]})


@pytest.mark.parametrize(
    ("kind", "twin", "shape"),
    [
        (nn.Conv1d, dcnet.DecoupledConv1d, (2, 4, 9)),
        (nn.Conv2d, dcnet.DecoupledConv2d, (2, 4, 9, 9)),
        (nn.Conv3d, dcnet.DecoupledConv3d, (2, 4, 5, 5, 5)),
        (nn.Linear, dcnet.DecoupledLinear, (2, 4)),
    ],
)
def test_a_single_layer_converts_to_an_equal_new_layer(kind, twin, shape):
    options = {} if kind is nn.Linear else {"kernel_size": 3, "stride": 2, "groups": 2, "padding": "valid"}
    plain = kind(4, 6, **options)
    built = twin(4, 6, **options, operator="seg-sqcos", eps=1e-3)
    built.load_state_dict(plain.state_dict(), strict=False)
    layer = decouple(plain, "seg-sqcos", linear=True, eps=1e-3)
    x = torch.randn(shape)
    assert type(layer) is twin
    assert type(plain) is kind
    assert repr(layer) == repr(built)
    assert torch.equal(layer(x), built(x))
    torch.testing.assert_close(layer.state_dict(), built.state_dict(), rtol=0, atol=0)
    assert decouple(plain, "seg-sqcos", linear=True, inplace=True) is plain
    assert type(plain) is twin


def test_a_copy_leaves_the_original_untouched():
    model = network()
    before, text, x = copy.deepcopy(model.state_dict()), repr(model), torch.randn(2, 3, 8, 8)
    changed = decouple(model, "tanh-cos", linear=True)
    changed(x).sum().backward()
    assert repr(model) == text
    assert model.state_dict().keys() == before.keys()
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(changed.state_dict()[name], before[name]) for name in before if "weight" in name)


def test_in_place_keeps_parameters_optimizer_hooks_and_flags():
    model = network().double().to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    calls = []
    model[1].conv1.register_forward_hook(lambda *args: calls.append(1))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert decouple(model, "tanh-cos", inplace=True) is model
    after = dict(model.named_parameters())
    assert all(after[name] is parameters[name] for name in parameters)
    assert {name.split(".")[-1] for name in after.keys() - parameters.keys()} == {"radius"}
    assert not model[0].weight.requires_grad
    assert not model[1].conv1.training
    assert model[2].conv1.training
    assert model[1].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].conv1.radius.dtype == torch.float64
    before = model[2].conv1.weight.clone()
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert calls == [1]
    assert not torch.equal(model[2].conv1.weight, before)


@pytest.mark.parametrize("inplace", [True, False])
def test_tied_weights_and_shared_layers_stay_shared(inplace):
    shared = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.Conv2d(4, 4, 3, padding=1))
    model[2].weight = shared.weight
    model = decouple(model, "tanh-cos", inplace=inplace)
    assert model[0] is model[1][1]
    assert model[2].weight is model[0].weight
    assert isinstance(model[2], Decoupled)
    assert len(list(model.parameters())) == 5


def test_converted_networks_copy_and_pickle():
    model = decouple(network(), "tanh-cos").eval()
    x = torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


class Standardized(nn.Conv2d):
    def forward(self, input):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight, self.bias)


class Renamed(nn.Conv2d):
    pass


def odd_layers():
    replaced = nn.Conv2d(3, 4, 3)
    replaced.forward = lambda x: x
    return {
        "transposed": (nn.ConvTranspose2d(3, 4, 3), "transposed convolution"),
        "standardized": (Standardized(3, 4, 3), "Standardized may compute something else"),
        "lazy": (nn.LazyConv2d(4, 3), "lazy"),
        "weight_norm": (parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), "parametrized"),
        "pruned": (prune.random_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5), "computed by a hook"),
        "replaced": (replaced, "forward was replaced"),
    }


def test_layers_that_cannot_be_decoupled_stay_and_are_reported():
    model = nn.ModuleDict({name: layer for name, (layer, _) in odd_layers().items()})
    model["plain"] = nn.Conv2d(3, 4, 3)
    model["attention"] = nn.MultiheadAttention(4, 2)
    model["encoder"] = nn.TransformerEncoderLayer(4, 2, 8)
    reports = []
    decouple(model, "tanh-cos", linear=True, inplace=True, report=reports.append)
    (report,) = reports
    assert report.changed == ["plain", "encoder.linear1", "encoder.linear2"]
    assert decoupled_names(model) == {"plain", "encoder.linear1", "encoder.linear2"}
    for name, (_, reason) in odd_layers().items():
        assert reason in report.left[name]
        assert name in str(report)
    assert "without calling it" in report.left["attention.out_proj"]
    assert "without calling it" in report.left["encoder.self_attn.out_proj"]
    assert "layers changed: 3, left: 10" in str(report)
    assert "4x3x3x3" in str(report)


def test_a_subclass_listed_in_also_is_converted():
    model = nn.Sequential(Renamed(3, 4, 3), Standardized(4, 4, 3))
    assert decoupled_names(decouple(model, "tanh-cos", also=[Renamed])) == {"0"}


class Named(dcnet.DecoupledConv2d):
    pass


class Doubled(dcnet.DecoupledConv2d):
    def decoupled(self, input):
        return 2 * super().decoupled(input)


def test_a_renamed_decoupled_layer_is_recoupled_but_not_one_that_computes_something_else():
    model = nn.Sequential(Named(3, 4, 3), Doubled(4, 4, 3))
    reports = []
    back = recouple(model, report=reports.append)
    assert type(back[0]) is nn.Conv2d
    assert "Doubled may compute something else" in reports[0].left["1"]


def test_a_conversion_that_changes_nothing_is_rejected():
    with pytest.raises(ValueError, match="no layer of Sequential is decoupled: linear layers stay unless"):
        decouple(nn.Sequential(nn.Linear(3, 4)), "tanh-cos")
    with pytest.raises(ValueError, match="no layer of ReLU is decoupled: it has no convolution"):
        decouple(nn.ReLU(), "tanh-cos")
    model = decouple(network(), "tanh-cos")
    assert decoupled_names(decouple(model, "tanh-cos")) == CONVOLUTIONS


def test_wrong_options_are_rejected():
    with pytest.raises(ValueError, match="'calibrated', not 'calibrate'"):
        decouple(network(), "tanh-cos", start="calibrate")
    with pytest.raises(ValueError, match="unknown magnitude 'tan'"):
        decouple(network(), "tan-cos")
    with pytest.raises(ValueError, match="eps must not be negative, not -1"):
        decouple(network(), "tanh-cos", eps=-1)


@pytest.mark.parametrize("operator", ["tanh-cos", "seg(learnable=True)-sigmoid(learnable=True)+product"])
@pytest.mark.parametrize("inplace", [True, False])
def test_decoupling_and_recoupling_gives_the_same_network(operator, inplace):
    model, x = network(), torch.randn(2, 3, 8, 8)
    changed = decouple(model, operator, linear=True, blend=0.5)
    changed(x)
    changed.load_state_dict(model.state_dict(), strict=False)
    back = recouple(changed, inplace=inplace)
    assert (back is changed) == inplace
    assert repr(back) == repr(model)
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert vars(back[0]).keys() == vars(model[0]).keys()
    assert torch.equal(back.eval()(x), model.eval()(x))


def test_one_operator_replaces_another():
    model = decouple(network(), "tanh-cos", include="1.*")
    again = decouple(model, "ball-sigmoid(learnable=True)", include="1.conv1", exclude="0")
    assert str(again[1].conv1.operator) == "ball-sigmoid(learnable=True)"
    assert str(again[1].point.operator) == "tanh-cos"
    assert again[1].conv1.radius is not model[1].conv1.radius
    plain = decouple(again, "conv", include="*.point")
    assert type(plain[1].point) is nn.Conv2d
    assert decoupled_names(plain) == {"1.conv1", "1.depth", "1.downsample.0"}
    assert repr(decouple(network(), "conv")) == repr(network())


@pytest.mark.parametrize("operator", ["linear-cos+linear", "linear-cos+joint", "linear-cos+product"])
def test_a_weighted_linear_cosine_keeps_the_function(operator):
    model, x = network().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for options in ({}, {"start": "calibrated", "data": [x]}):
        changed = decouple(model, operator, linear=True, eps=0.0, **options)
        torch.testing.assert_close(changed(x), model(x))
        assert changed.state_dict().keys() == model.state_dict().keys()


def test_invalid_models_reports_and_patterns_are_rejected():
    with pytest.raises(TypeError, match=r"model must be an nn.Module, not 'resnet'"):
        decouple("resnet", "tanh-cos")
    with pytest.raises(TypeError, match="report must be a function"):
        decouple(nn.Conv2d(3, 4, 3), "tanh-cos", report=True)
    with pytest.raises(ValueError, match=r"pattern 'a' matches no layer.* did you mean 'a\.\*'"):
        decouple(nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 4, 3))}), "tanh-cos", include="a")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"include": 5}, "include must be a pattern"),
        ({"exclude": [nn.Conv2d]}, "exclude must be a pattern"),
        ({"where": "conv"}, "where must be a function of name and layer"),
        ({"also": nn.Conv2d}, "also must be a list of classes"),
    ],
)
def test_invalid_selections_are_rejected(given, problem):
    with pytest.raises(TypeError, match=problem):
        dcnet.decouple(nn.Sequential(nn.Conv2d(3, 4, 3)), "tanh-cos", **given)


def test_recoupled_layers_have_no_process_group():
    model = dcnet.decouple(nn.Sequential(nn.Conv2d(3, 4, 3)), "tanh-cos")
    model[0].sync = Processes("a group")
    plain = dcnet.recouple(model)
    assert "sync" not in vars(plain[0])
    pickle.loads(pickle.dumps(plain))
