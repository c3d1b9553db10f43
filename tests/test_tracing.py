"""Layers under torch.fx, torch.jit and torch's transformers."""

import copy
import importlib
import io
import pickle
import re
import warnings

import pytest
import reference
import torch
from helpers.packages import timm_or_skip
from torch import fx, nn

import dcnet
from dcnet.convert import plan
from dcnet.inference.folded_layers import Folded
from dcnet.layers import Decoupled
from dcnet.models import networks

# --- torch.fx traces decoupled and folded layers as calls, like torch's own, in training and evaluation mode ---


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
    """The model in evaluation mode, after a batch that sets the mean norms."""
    model(torch.randn(shape))
    return model.eval()


def same(traced, model, *shape):
    x = torch.randn(shape)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("blend", [None, 0.5])
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_is_traced_alone_and_in_a_network(kind, blend):
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
def test_folded_layer_is_traced_alone_and_in_a_network(kind, operator):
    make, shape = LAYERS[kind]
    layer = settled(make(operator=operator), *shape)
    for model in (dcnet.fold(layer), dcnet.fold(nn.Sequential(layer, nn.ReLU()))):
        same(fx.symbolic_trace(model), model, *shape)


def test_traced_network_trains_and_tracks_mean_norms_like_the_network():
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
def test_registered_networks_are_traced(name):
    model = dcnet.create_model(name, "tanh-cos", num_classes=5, width=0.125)
    layers = [path for path, module in model.named_modules() if isinstance(module, Decoupled)]
    for mode in (True, False):
        graph = fx.Tracer().trace(model.train(mode))
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        assert set(layers) <= set(called)


@pytest.mark.parametrize("name", ["cnn9-small", "resnet32"])
def test_traced_network_matches_the_network(name):
    model = dcnet.create_model(name, "tanh-cos", num_classes=5, width=0.25, in_channels=1, image_size=16)
    traced = fx.symbolic_trace(settled(model, 2, 1, 16, 16))
    same(traced, model, 3, 1, 16, 16)
    folded = dcnet.fold(model)
    same(fx.symbolic_trace(folded), folded, 3, 1, 16, 16)
    again = dcnet.fold(traced)
    assert any(isinstance(module, Folded) for module in again.modules())
    torch.testing.assert_close(again(torch.ones(1, 1, 16, 16)), folded(torch.ones(1, 1, 16, 16)))


def test_hooks_and_the_forward_of_a_subclass_run_once():
    hooked = dcnet.DecoupledLinear(4, 5, operator="linear-sqcos")
    hooked.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    hooked.register_forward_hook(lambda layer, args, output: 3 * output)
    for model in (nn.Sequential(hooked), nn.Sequential(Doubled(4, 5)), Doubled(4, 5)):
        traced = fx.symbolic_trace(settled(model, 6, 4))
        same(traced, model, 6, 4)
        same(fx.symbolic_trace(traced), model, 6, 4)


def test_torchvision_extracts_features():
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


# --- torch.jit.trace of layers in evaluation mode, saved and loaded again ---


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
]


def traced(model, x):
    with warnings.catch_warnings():
        # Checked sizes become constants of the trace.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        found = torch.jit.trace(model, x)
    content = io.BytesIO()
    torch.jit.save(found, content)
    content.seek(0)
    return found, torch.jit.load(content)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    "operator", ["tanh-cos", "seg-sqcos", "linear-cos", "log-sigmoid+product", "ball-spline+joint"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_jit_traced_layer_matches_before_and_after_saving(kind, operator, folded):
    make, shape = LAYERS[kind]
    model = nn.Sequential(make(operator=operator), nn.ReLU())
    model(torch.randn(shape))
    model = dcnet.fold(model) if folded else model.eval()
    other = torch.randn(shape[0] + 3, *shape[1:])
    for found in traced(model, torch.randn(shape)):
        torch.testing.assert_close(found(other), model(other))


def test_jit_traced_single_layer_matches():
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    layer(torch.randn(2, 3, 8, 8))
    layer.eval()
    for found in traced(layer, torch.randn(1, 3, 8, 8)):
        x = torch.randn(4, 3, 10, 9)
        torch.testing.assert_close(found(x), layer(x))


def test_jit_traced_network_matches():
    model = dcnet.create_model("cnn9-small", "tanh-cos", num_classes=5, width=0.25, in_channels=1, image_size=16)
    model(torch.randn(4, 1, 16, 16))
    for found in traced(model.eval(), torch.randn(2, 1, 16, 16)):
        x = torch.randn(5, 1, 16, 16)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


# --- torch's transformers, whose fast path would use the weights without calling the layers ---


OPERATOR = "tanh(radius=2.0)-sqcos+linear"
# True for padding: at the end of sequences, for which torch uses nested tensors, and elsewhere.
PADDED = {
    "none": None,
    "at the end": torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).bool(),
    "elsewhere": torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]]).bool(),
}


def encoder(norm_first=False, layers=2):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first).double()


def by_hand(model):
    for layer in model.layers:
        for name in ("linear1", "linear2"):
            old = getattr(layer, name)
            new = dcnet.DecoupledLinear(old.in_features, old.out_features, dtype=torch.float64, operator=OPERATOR)
            new.load_state_dict(old.state_dict())
            setattr(layer, name, new)
    return model


def one_by_one(model):
    for layer in model.layers:
        dcnet.decouple(layer.linear1, OPERATOR, linear=True, inplace=True)
        dcnet.decouple(layer.linear2, OPERATOR, linear=True, inplace=True)
    return model


def as_a_whole(model):
    return dcnet.decouple(model, OPERATOR, linear=True)


def pickled(model):
    return pickle.loads(pickle.dumps(as_a_whole(model)))


def folded(model):
    return dcnet.fold(as_a_whole(model))


def run(model, x, padded):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
        return model(x, src_key_padding_mask=padded)


def rows(layer, x):
    """A decoupled linear layer in plain loops."""
    given = [[[float(v) for v in row] for row in layer.weight], [float(v) for v in layer.bias]]
    names = ("tanh", "sqcos", "linear")
    values = [
        [reference.operator(names, w, list(map(float, row)), rho=2.0) + b for w, b in zip(*given, strict=True)]
        for row in x.reshape(-1, x.shape[-1])
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(*x.shape[:-1], -1)


def in_plain_loops(layer, x, padded):
    """The output of an encoder layer from its parts; attention in training mode has no fast path."""
    attention = copy.deepcopy(layer.self_attn).train()
    first = layer.norm1(x) if layer.norm_first else x
    x = x + attention(first, first, first, key_padding_mask=padded, need_weights=False)[0]
    x = x if layer.norm_first else layer.norm1(x)
    inner = rows(layer.linear1, layer.norm2(x) if layer.norm_first else x).relu()
    x = x + rows(layer.linear2, inner)
    return x if layer.norm_first else layer.norm2(x)


@pytest.mark.parametrize("padded", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("put_in", [by_hand, one_by_one, as_a_whole, pickled, folded])
def test_encoder_gives_the_same_in_evaluation_and_training(put_in, norm_first, padded):
    plain, x = encoder(norm_first), torch.randn(3, 4, 8, dtype=torch.float64)
    expected = run(by_hand(copy.deepcopy(plain)).train(), x, padded)
    found = run(put_in(plain.eval()).eval(), x, padded)
    there = torch.ones(3, 4, dtype=torch.bool) if padded is None else ~padded
    torch.testing.assert_close(found[there], expected[there])


@pytest.mark.parametrize("padded", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_in_evaluation_matches_its_equation(norm_first, padded):
    model, x = as_a_whole(encoder(norm_first, layers=1)).eval(), torch.randn(3, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = in_plain_loops(model.layers[0], x, padded)
    there = torch.ones(3, 4, dtype=torch.bool) if padded is None else ~padded
    torch.testing.assert_close(run(model, x, padded)[there], expected[there])


def test_compiled_encoder_gives_the_same():
    model, x = as_a_whole(encoder()).eval(), torch.randn(3, 4, 8, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, x, None), run(model, x, None))


def test_plain_layers_keep_the_fast_path():
    model, calls = encoder(layers=1).eval(), []
    layer = model.layers[0]
    recoupled = dcnet.recouple(dcnet.decouple(layer, OPERATOR, linear=True))
    assert not any(module._forward_pre_hooks for module in recoupled.modules())
    recoupled.linear1.forward = lambda x: calls.append(x)
    run(nn.TransformerEncoder(recoupled, 1).eval(), torch.randn(3, 4, 8, dtype=torch.float64), None)
    assert not calls


def test_nested_tensors_are_batches_of_rows():
    parts = [torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)]
    layer = dcnet.DecoupledLinear(4, 5, dtype=torch.float64)
    expected = layer(torch.cat(parts))
    layer.mean_norm.zero_()
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
            nested = torch.nested.nested_tensor(parts, layout=layout)
        found = layer(nested)
        assert found.is_nested
        torch.testing.assert_close(torch.cat(found.unbind()), expected)
        torch.testing.assert_close(layer.mean_norm, torch.cat(parts).square().sum(1).add(1e-4).sqrt().mean())


def test_attention_rejects_a_layer_that_it_would_not_call():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="out_proj of MultiheadAttention cannot be a DecoupledLinear: attention uses"):
        attention.out_proj = dcnet.DecoupledLinear(8, 8)
    assert type(attention.out_proj) is not dcnet.DecoupledLinear


def test_modules_without_a_decoupled_equivalent_are_reported():
    parts = {"lstm": nn.LSTM(4, 4), "cell": nn.GRUCell(4, 4), "both": nn.Bilinear(2, 3, 4)}
    model = nn.ModuleDict({**parts, "encoder": encoder(layers=1), "convolution": nn.Conv2d(3, 4, 3)})
    found = plan(model, "tanh-cos", dcnet.convert.Choice(linear=True))
    assert found.changed == ["encoder.layers.0.linear1", "encoder.layers.0.linear2", "convolution"]
    assert {name: re.split(" by | with ", reason)[0] for name, reason in found.left.items()} == {
        "lstm": "a recurrent layer multiplies",
        "cell": "a recurrent layer multiplies",
        "both": "a bilinear layer has two inputs, so there is no patch to compare filters with",
        "encoder.layers.0.self_attn": "attention projects queries, keys and values",
        "encoder.layers.0.self_attn.out_proj": "nn.MultiheadAttention uses its weight without calling it",
    }
    assert [row.shape for row in found.rows][:3] == ["16x4", "12x4", "4x2x3"]
