"""Conversion of the scores of attention in whole networks: which modules, their reports, and the way back."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from helpers.packages import timm_or_skip
from torch import nn

import dcnet
from dcnet.attention import COSINE
from dcnet.convert import Choice, plan
from dcnet.functional import decoupled_attention

PLAIN_SCORES = "linear-cos+linear"


class Attention(nn.Module):
    """Attention as timm writes it: `fused_attn` says that it calls torch's function."""

    def __init__(self, channels=8, heads=2, scale=None, **attributes):
        super().__init__()
        self.num_heads, self.scale, self.fused_attn = heads, scale, True
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        for name, value in attributes.items():
            setattr(self, name, value)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        query, key, value = self.split(x)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.proj(found.transpose(1, 2).flatten(2))


class CustomAttention(Attention):
    def __init__(self):
        super().__init__()
        del self.fused_attn


class StepByStep(CustomAttention):
    def forward(self, x):
        query, key, value = self.split(x)
        return self.proj(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))


def network():
    return nn.Sequential(nn.Conv1d(8, 8, 1), nn.Flatten(2), Attention(), nn.Linear(8, 8), Attention()).double()


def tokens():
    return torch.randn(3, 8, 8, dtype=torch.float64)


def learned(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def outputs_and_gradients(model, x):
    output = model(x)
    return output, torch.autograd.grad(output.square().sum(), learned(model))


# --- values ---


@pytest.mark.parametrize("scale", [None, 0.3])
def test_plain_scores_keep_outputs_and_gradients(scale):
    model, x = Attention(scale=scale).double(), tokens()
    converted = dcnet.decouple(model, attention=PLAIN_SCORES)
    found, expected = (outputs_and_gradients(each, x) for each in (converted, model))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", ["sphere-cos", "log-sqcos+product"])
def test_scores_are_those_of_the_function(operator):
    model, x = Attention().double(), tokens()
    parts = model.split(x)
    expected = decoupled_attention(*parts, is_causal=True, operator=operator, eps=1e-3)
    found = dcnet.decouple(model, attention=operator, eps=1e-3)(x)
    torch.testing.assert_close(found, model.proj(expected.transpose(1, 2).flatten(2)))


def test_a_scale_of_the_module_multiplies_the_default():
    model, x = Attention(scale=3 / 2.0).double(), tokens()  # heads have 4 features: 3 times the scale of torch
    expected = decoupled_attention(*model.split(x), is_causal=True, operator="sphere-cos", scale=3 * 2.0)
    found = dcnet.decouple(model, attention="sphere-cos")(x)
    torch.testing.assert_close(found, model.proj(expected.transpose(1, 2).flatten(2)))


def test_a_module_that_does_not_call_torchs_function_is_reported_at_its_first_call():
    model = dcnet.decouple(StepByStep(), attention="sphere-cos", also=[StepByStep])
    with pytest.raises(RuntimeError, match="StepByStep did not call scaled_dot_product_attention, so the"):
        model(torch.randn(2, 3, 8))


# --- selection and report ---


def test_only_attention_is_converted_without_an_operator():
    reports, model = [], network()
    converted = dcnet.decouple(model, attention="sphere-cos", report=reports.append)
    assert [row.layer for row in reports[0].rows] == reports[0].changed == ["2", "4"]
    assert [row.after for row in reports[0].rows] == ["Attention sphere-cos"] * 2
    assert reports[0].rows[0].shape == "heads: 2"
    assert type(converted[0]) is nn.Conv1d
    assert isinstance(converted[2], Attention)
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert type(model[2]) is Attention


def test_layers_and_attention_are_converted_together():
    model = dcnet.decouple(network(), "tanh-cos", linear=True, attention=COSINE)
    assert isinstance(model[2].qkv, dcnet.DecoupledLinear)
    assert isinstance(model[2].scores, dcnet.DecoupledAttention)
    assert "2.scores.scale" in model.state_dict()
    outputs = model(tokens())
    outputs.sum().backward()
    assert model[2].scores.scale.grad is not None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "4"}, ["4"]),
        ({"exclude": "4"}, ["2"]),
        ({"where": lambda name, module: name == "2"}, ["2"]),
    ],
)
def test_attention_is_selected_by_name(options, expected):
    assert plan(network(), None, Choice(**options), "sphere-cos").changed == expected


def test_attention_that_stays_is_reported():
    replaced, own = Attention(), Attention(scores=1)
    replaced.forward = lambda x: x
    parts = {
        "plain": Attention(),
        "replaced": replaced,
        "own": own,
        "temperature": Attention(temperature=1.0),
        "unfused": Attention(fused_attn=False),
        "custom": CustomAttention(),
        "headless": Attention(num_heads=None),
        "torch": type("Renamed", (nn.MultiheadAttention,), {})(8, 2),
    }
    found = plan(nn.ModuleDict(parts), None, None, COSINE)
    assert found.changed == ["plain"]
    assert {name: reason.partition(":")[0].partition(";")[0] for name, reason in found.left.items()} == {
        "replaced": "its forward was replaced",
        "own": "it has an attribute named scores already",
        "temperature": "it normalizes queries and keys itself",
        "unfused": "it calls scaled_dot_product_attention only with fused_attn=True",
        "custom": "it may not call scaled_dot_product_attention",
        "headless": "it has no num_heads, which constants per head need",
        "torch": "Renamed may compute something else",
    }
    more = plan(nn.ModuleDict(parts), None, Choice(also=[CustomAttention, type(parts["torch"])]), "sphere-cos")
    assert more.changed == ["plain", "custom", "headless", "torch"]


def test_a_class_in_also_is_converted():
    model, x = CustomAttention().double(), tokens()
    converted = dcnet.decouple(model, attention=COSINE, also=[CustomAttention])
    assert not torch.allclose(converted(x), model(x))
    back = dcnet.recouple(converted)
    assert type(back) is CustomAttention
    assert torch.equal(back(x), model(x))


# --- the way back, and other operators ---


def test_recoupling_gives_the_same_network():
    model, x = network(), tokens()
    converted = dcnet.decouple(model, "tanh-cos", linear=True, attention=COSINE)
    reports = []
    back = dcnet.recouple(converted, report=reports.append)
    assert {"2", "4"} <= set(reports[0].changed)
    assert repr(back) == repr(model)
    assert back.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(back(x), model(x))
    assert vars(back[2]).keys() == vars(model[2]).keys()


def test_one_operator_replaces_another():
    model = dcnet.decouple(network(), attention=COSINE)
    again = dcnet.decouple(model, attention="sphere-sqcos", include="4", inplace=True)
    assert again is model
    assert [str(model[place].scores.operator) for place in (2, 4)] == [COSINE, "sphere-sqcos"]
    assert type(model[4]) is type(model[2])
    assert plan(model, None, None, "sphere-sqcos").left == {"4": "has this operator already"}
    plain = dcnet.decouple(model, attention="conv", include="4")
    assert type(plain[4]) is Attention
    assert type(plain[2]) is type(model[2])


def test_converted_networks_copy_and_pickle():
    model, x = dcnet.decouple(network(), attention=COSINE), tokens()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[2]) is type(model[2])
        assert torch.equal(other(x), model(x))
        assert type(dcnet.recouple(other)[2]) is Attention


def test_a_failed_calibration_leaves_attention_plain():
    model = network()
    with pytest.raises(ValueError, match="calibration data"):
        dcnet.decouple(model, "tanh-cos", attention=COSINE, start="calibrated", data=[], inplace=True)
    assert repr(model) == repr(network())


def test_calibration_sees_plain_attention():
    model, x = network(), tokens()
    settings = {"linear": True, "start": "calibrated", "data": [x]}
    alone = dcnet.decouple(model, "tanh-cos", **settings)
    both = dcnet.decouple(model, "tanh-cos", attention="sphere-cos", **settings)
    torch.testing.assert_close(both.state_dict(), alone.state_dict(), rtol=0, atol=0)


# --- graphs ---


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # in strict mode: the `with`
@pytest.mark.parametrize("operator", [COSINE, "sphere-sqcos"])
def test_compiled_exported_and_traced(operator):
    torch.compiler.reset()
    model, x = dcnet.decouple(network(), attention=operator), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exported = [torch.export.export(model, (x,), strict=strict).module() for strict in (False, True)]
    for graph in (compiled, *exported, torch.fx.symbolic_trace(model)):
        torch.testing.assert_close(graph(x), model(x))
    found = torch.autograd.grad(compiled(x).square().sum(), learned(model))
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), learned(model)))


# --- networks of dcnet and timm ---


@pytest.mark.parametrize("name", ["vit-tiny", "vit-tiny-normalized"])
def test_networks_of_dcnet(name):
    options = {"num_classes": 3, "width": 128 / 192, "image_size": 8}
    model = dcnet.create_model(name, "conv", **options).double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    converted = dcnet.decouple(model, attention=PLAIN_SCORES)
    found, expected = (outputs_and_gradients(each, x) for each in (converted, model))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    built = dcnet.create_model(name, "conv", **options, attention=COSINE)
    assert built.body.block1.attention.scores.scale.shape == (2,)


def test_attention_of_a_network_without_attention_is_an_error():
    with pytest.raises(ValueError, match="no attention of Network is decoupled: it has no attention"):
        dcnet.create_model("cnn9-small", "tanh-cos", attention="sphere-cos")


@pytest.mark.parametrize(
    ("name", "count"),
    [("test_vit", 6), ("test_vit2", 8), ("vit_small_patch16_rope_224", 1), ("eva02_tiny_patch14_224", 1)],
)
def test_networks_of_timm(name, count):
    options = {} if count > 1 else {"depth": 1}
    model = timm_or_skip().create_model(name, num_classes=3, **options).double()
    side = model.default_cfg["input_size"][-1]
    x, reports = torch.randn(1, 3, side, side, dtype=torch.float64), []
    converted = dcnet.decouple(model, attention=PLAIN_SCORES, report=reports.append)
    assert len(reports[0].changed) == count
    found, expected = (outputs_and_gradients(each, x) for each in (converted, model))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    cosine = dcnet.decouple(model, attention=COSINE)
    assert (cosine(x) - model(x)).abs().max() > 1e-9  # timm's initial weights are small
    assert cosine.state_dict().keys() - model.state_dict().keys() == {
        f"{name}.scores.scale" for name in reports[0].changed
    }


# --- errors ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "decouple needs an operator for layers, such as 'tanh-cos', or attention='sphere-cos'"),
        (
            {"attention": "tanh-cos"},
            "'tanh-cos' has a radius relative to the mean norm, which attention does not compute",
        ),
        ({"attention": "sphere-cosine"}, "unknown angle 'cosine'"),
        (
            {"attention": "sphere-cos", "blend": 0.5},
            "blend=0.5 is for layers and requires an operator, not None",
        ),
        (
            {"attention": "sphere-cos", "start": "calibrated", "data": []},
            "is for layers and requires an operator, not None",
        ),
        ({"attention": "sphere-cos", "include": "9"}, "pattern '9' matches no layer"),
        ({"attention": "sphere-cos", "exclude": ["2", "4"]}, "no attention of Sequential is decoupled: in exclude"),
    ],
)
def test_wrong_options_raise_one_sentence(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        dcnet.decouple(network(), **given)
    assert "\n" not in str(error.value)


def test_operator_and_attention_must_both_change_something():
    with pytest.raises(ValueError, match="no attention of Conv2d is decoupled: it has no attention"):
        dcnet.decouple(nn.Conv2d(3, 4, 3), "tanh-cos", attention="sphere-cos")
    with pytest.raises(ValueError, match="no layer of Attention is decoupled: linear layers stay unless"):
        dcnet.decouple(Attention(), "tanh-cos", attention="sphere-cos")
