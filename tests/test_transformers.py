"""Decoupled layers inside of torch's transformers, which in evaluation would use the weights without a call."""

import copy
import pickle
import warnings

import pytest
import reference
import torch
from torch import nn

import dcnet
from dcnet.convert import plan

OPERATOR = "tanh(radius=2.0)-sqcos+linear"
# True where there is nothing: at the end of sequences, which torch makes nested tensors of, and elsewhere.
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
    """What an encoder layer computes, by its parts; attention in training mode has no fast path."""
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
def test_an_encoder_computes_in_evaluation_what_it_computes_in_training(put_in, norm_first, padded):
    plain, x = encoder(norm_first), torch.randn(3, 4, 8, dtype=torch.float64)
    expected = run(by_hand(copy.deepcopy(plain)).train(), x, padded)
    found = run(put_in(plain.eval()).eval(), x, padded)
    there = torch.ones(3, 4, dtype=torch.bool) if padded is None else ~padded
    torch.testing.assert_close(found[there], expected[there])


@pytest.mark.parametrize("padded", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_in_evaluation_is_its_equation(norm_first, padded):
    model, x = as_a_whole(encoder(norm_first, layers=1)).eval(), torch.randn(3, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = in_plain_loops(model.layers[0], x, padded)
    there = torch.ones(3, 4, dtype=torch.bool) if padded is None else ~padded
    torch.testing.assert_close(run(model, x, padded)[there], expected[there])


def test_a_compiled_encoder_computes_the_same():
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


def test_the_rows_of_nested_tensors_are_rows():
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


def test_attention_does_not_take_a_layer_that_it_would_not_call():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="out_proj of MultiheadAttention cannot be a DecoupledLinear: attention uses"):
        attention.out_proj = dcnet.DecoupledLinear(8, 8)
    assert type(attention.out_proj) is not dcnet.DecoupledLinear


def test_what_has_no_decoupled_twin_is_listed_as_left():
    parts = {"lstm": nn.LSTM(4, 4), "cell": nn.GRUCell(4, 4), "both": nn.Bilinear(2, 3, 4)}
    model = nn.ModuleDict({**parts, "encoder": encoder(layers=1), "convolution": nn.Conv2d(3, 4, 3)})
    found = plan(model, "tanh-cos", dcnet.convert.Choice(linear=True))
    assert found.changed == ["encoder.layers.0.linear1", "encoder.layers.0.linear2", "convolution"]
    assert {name: reason.split(" by ")[0] for name, reason in found.left.items()} == {
        "lstm": "a recurrent layer multiplies",
        "cell": "a recurrent layer multiplies",
        "both": "a bilinear layer has two inputs, and no one patch that filters could be compared with",
        "encoder.layers.0.self_attn": "attention projects queries, keys and values",
        "encoder.layers.0.self_attn.out_proj": "nn.MultiheadAttention uses its weight without calling it",
    }
    assert [row.shape for row in found.rows][:3] == ["16x4", "12x4", "4x2x3"]
