"""torch.fx takes decoupled and folded layers as it takes torch's own: as calls, in training and in evaluation."""

import copy
import importlib
import pickle

import pytest
import torch
from conftest import timm_or_skip
from torch import fx, nn

import dcnet
from dcnet.folded import Folded
from dcnet.layers import Decoupled
from dcnet.models import networks

LAYERS = {
    "linear": (lambda **kw: dcnet.DecoupledLinear(4, 5, **kw), (6, 4)),
    "conv1d": (lambda **kw: dcnet.DecoupledConv1d(4, 5, 3, **kw), (2, 4, 8)),
    "conv2d": (lambda **kw: dcnet.DecoupledConv2d(4, 6, 3, padding=1, groups=2, **kw), (2, 4, 8, 8)),
    "conv3d": (lambda **kw: dcnet.DecoupledConv3d(4, 5, 2, padding=1, padding_mode="circular", **kw), (2, 4, 3, 3, 3)),
}


class Doubled(dcnet.DecoupledLinear):
    def forward(self, input):
        return 2 * super().forward(input)


def settled(model, *shape):
    """In evaluation, after a batch from which the mean norms are."""
    model(torch.randn(shape))
    return model.eval()


def same(traced, model, *shape):
    x = torch.randn(shape)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("blend", [None, 0.5])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_traced_alone_and_in_a_network(kind, blend):
    make, shape = LAYERS[kind]
    for model in (make(blend=blend), nn.Sequential(make(blend=blend), nn.ReLU())):
        traced = fx.symbolic_trace(model)
        assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "output"}
        settled(model, *shape)
        same(traced.eval(), model, *shape)
        traced.graph.lint()
        same(fx.symbolic_trace(traced), model, *shape)
        same(pickle.loads(pickle.dumps(traced)), model, *shape)
        same(copy.deepcopy(traced), model, *shape)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("operator", ["tanh-cos", "linear-cos", "seg-sigmoid+product"])
def test_a_folded_layer_is_traced_alone_and_in_a_network(kind, operator):
    make, shape = LAYERS[kind]
    layer = settled(make(operator=operator), *shape)
    for model in (dcnet.fold(layer), dcnet.fold(nn.Sequential(layer, nn.ReLU()))):
        same(fx.symbolic_trace(model), model, *shape)


def test_a_traced_network_tracks_mean_norms_and_learns_as_the_network_does():
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3), nn.ReLU(), dcnet.DecoupledConv2d(4, 5, 3))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    traced = fx.symbolic_trace(other)
    for found in (model, traced):
        found(x).square().sum().backward()
    assert model[2].mean_norm > 0
    for one, two in zip(model, other, strict=True):
        if isinstance(one, Decoupled):
            assert one.mean_norm == two.mean_norm
            torch.testing.assert_close(one.radius.grad, two.radius.grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", networks)
def test_the_networks_of_the_registry_are_traced(name):
    model = dcnet.create_model(name, "tanh-cos", num_classes=5, width=0.125)
    layers = [path for path, module in model.named_modules() if isinstance(module, Decoupled)]
    for mode in (True, False):
        graph = fx.Tracer().trace(model.train(mode))
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        assert set(layers) <= set(called)


@pytest.mark.parametrize("name", ["cnn9-small", "resnet32"])
def test_a_traced_network_gives_what_the_network_gives(name):
    model = dcnet.create_model(name, "tanh-cos", num_classes=5, width=0.25, in_channels=1, image_size=16)
    traced = fx.symbolic_trace(settled(model, 2, 1, 16, 16))
    same(traced, model, 3, 1, 16, 16)
    folded = dcnet.fold(model)
    same(fx.symbolic_trace(folded), folded, 3, 1, 16, 16)
    again = dcnet.fold(traced)
    assert any(isinstance(module, Folded) for module in again.modules())
    torch.testing.assert_close(again(torch.ones(1, 1, 16, 16)), folded(torch.ones(1, 1, 16, 16)))


def test_hooks_and_the_forward_of_a_subclass_count_once():
    hooked = dcnet.DecoupledLinear(4, 5, operator="linear-sqcos")
    hooked.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    hooked.register_forward_hook(lambda layer, args, output: 3 * output)
    for model in (nn.Sequential(hooked), nn.Sequential(Doubled(4, 5)), Doubled(4, 5)):
        traced = fx.symbolic_trace(settled(model, 6, 4))
        same(traced, model, 6, 4)
        same(fx.symbolic_trace(traced), model, 6, 4)


def test_torchvision_extracts_features_as_from_the_plain_twin():
    timm_or_skip()
    feature_extraction = importlib.import_module("torchvision.models.feature_extraction")
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3))
    model = settled(dcnet.decouple(twin, "tanh-cos"), 2, 3, 8, 8)
    for found in (twin, model, dcnet.fold(model)):
        extractor = feature_extraction.create_feature_extractor(found, return_nodes={"0": "first", "2": "last"})
        x = torch.randn(1, 3, 8, 8)
        features = extractor(x)
        torch.testing.assert_close(features["first"], found[0](x))
        torch.testing.assert_close(features["last"], found(x))
