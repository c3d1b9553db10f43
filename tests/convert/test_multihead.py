"""nn.MultiheadAttention with decoupled scores: compared with torch's own, and with plain loops."""

import copy
import math
import re

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import nn

from dcnet import decouple, recouple
from dcnet.attention import COSINE

PLAIN_SCORES = "linear-cos+linear"
SAMPLES, QUERIES, KEYS, CHANNELS, HEADS = 3, 4, 5, 8, 2


def attention(**options):
    module = nn.MultiheadAttention(CHANNELS, HEADS, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def inputs(module, same=False):
    shapes = {"query": (QUERIES, CHANNELS), "key": (KEYS, module.kdim), "value": (KEYS, module.vdim)}
    found = [torch.randn(SAMPLES, *shape, dtype=torch.float64) for shape in shapes.values()]
    found = found if module.batch_first else [each.transpose(0, 1).contiguous() for each in found]
    found = [each.requires_grad_() for each in found]
    return [found[0]] * 3 if same else found


def padding():
    found = torch.rand(SAMPLES, KEYS) > 0.6
    found[:, 0] = False
    return found


MODULES = {
    "default": {},
    "batch_first": {"batch_first": True},
    "other sizes": {"kdim": 6, "vdim": 3, "batch_first": True},
    "extra key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "bias": False},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
    "dropout": {"dropout": 0.4},
}
UPPER = torch.ones(QUERIES, KEYS).triu(1).bool()
CALLS = {
    "weights": {},
    "weights of heads": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "bool mask": {"need_weights": False, "attn_mask": UPPER},
    "float mask": {
        "need_weights": False,
        "attn_mask": torch.linspace(-1, 1, QUERIES * KEYS).view(QUERIES, KEYS).double(),
    },
    "mask per head": {"attn_mask": torch.rand(SAMPLES * HEADS, QUERIES, KEYS) > 0.9},
    "padding": {"need_weights": False, "key_padding_mask": padding()},
    "padding as numbers": {"key_padding_mask": torch.zeros(SAMPLES, KEYS).double().masked_fill(padding(), -math.inf)},
    "mask and padding": {
        "attn_mask": torch.eye(QUERIES, KEYS).bool(),
        "key_padding_mask": torch.eye(SAMPLES, KEYS).bool(),
    },
    "causal": {"need_weights": False, "attn_mask": UPPER, "is_causal": True},
    "causal with weights": {"attn_mask": UPPER, "is_causal": True},
}


def results(module, given, options):
    torch.manual_seed(0)  # for dropout
    output, weights = module(*given, **options)
    total = output.square().sum() if weights is None else output.square().sum() + weights.square().sum()
    learned = [each for each in (*given, *module.parameters()) if each.requires_grad]
    return output, weights, torch.autograd.grad(total, learned, allow_unused=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", MODULES)
def test_plain_scores_are_torchs_attention(kind, call):
    plain = attention(**MODULES[kind])
    given, options = inputs(plain), CALLS[call]
    expected = results(plain, given, options)
    converted = decouple(plain, attention=PLAIN_SCORES)
    assert type(converted) is not type(plain)
    torch.testing.assert_close(results(converted, given, options), expected, rtol=1e-9, atol=1e-12)
    assert converted.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_and_inputs_without_a_batch(need_weights):
    plain = attention()
    converted = decouple(plain, attention=PLAIN_SCORES)
    tokens = torch.randn(QUERIES, CHANNELS, dtype=torch.float64)
    for given in ([tokens] * 3, inputs(plain, same=True)):
        found, expected = (results(each, given, {"need_weights": need_weights}) for each in (converted, plain))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    padded = {"key_padding_mask": torch.tensor([False, False, True, True])}
    torch.testing.assert_close(converted(*[tokens] * 3, **padded), plain(*[tokens] * 3, **padded))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("names", [("sphere", "cos", "unweighted"), ("log", "sqcos", "product")])
def test_scores_are_the_equation(names, need_weights):
    plain = attention(batch_first=True)
    operator = f"{names[0]}-{names[1]}" + ("" if names[2] == "unweighted" else f"+{names[2]}")
    converted, (query, key, value) = decouple(plain, attention=operator), inputs(plain)
    found, weights = converted(query, key, value, need_weights=need_weights)
    projections = zip(plain.in_proj_weight.chunk(3), plain.in_proj_bias.chunk(3), strict=True)
    parts = [F.linear(x, w, b) for x, (w, b) in zip((query, key, value), projections, strict=True)]
    heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
    size = CHANNELS // HEADS
    scale = math.sqrt(size) if names[0] == "sphere" else 1 / math.sqrt(size)
    outputs = reference.attention(names, *heads, scale)
    expected = plain.out_proj(outputs.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert (weights is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(SAMPLES, QUERIES, dtype=torch.float64))


def test_learned_scale_per_head_changes_outputs_and_has_a_gradient():
    plain = attention(batch_first=True)
    converted, given = decouple(plain, attention=COSINE), inputs(plain)
    assert converted.state_dict().keys() - plain.state_dict().keys() == {"scores.scale"}
    assert converted.scores.scale.shape == (HEADS,)
    assert converted.scores.scale.dtype == torch.float64
    before = converted(*given)[0]
    nn.init.constant_(converted.scores.scale, 3.0)
    after = converted(*given)[0]
    assert not torch.allclose(before, after)
    after.square().sum().backward()
    assert (converted.scores.scale.grad != 0).all()


# --- inside of torch's transformers ---


def encoder(**options):
    layer = nn.TransformerEncoderLayer(CHANNELS, HEADS, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).double()


def encoded(model, tokens, **options):
    """Outputs of training, and of evaluation without gradients, in which torch has a fast path."""
    trained = model.train()(tokens, **options).detach()
    with torch.no_grad():
        return trained, model.eval()(tokens, **options)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("padded", [False, True])
def test_fast_path_of_an_encoder_does_not_bypass_the_scores(padded):
    model, tokens = encoder(), torch.randn(SAMPLES, KEYS, CHANNELS, dtype=torch.float64)
    mask = torch.arange(KEYS) >= torch.tensor([[5], [3], [2]]) if padded else None
    converted = decouple(model, attention="sphere-cos")
    trained, evaluated = encoded(converted, tokens, src_key_padding_mask=mask)
    kept = torch.ones(SAMPLES, KEYS, dtype=torch.bool) if mask is None else ~mask
    torch.testing.assert_close(evaluated[kept], trained[kept])
    assert not torch.allclose(evaluated[kept], encoded(model, tokens, src_key_padding_mask=mask)[1][kept])
    plain = encoded(recouple(converted), tokens, src_key_padding_mask=mask)[1]
    torch.testing.assert_close(plain[kept], encoded(model, tokens, src_key_padding_mask=mask)[1][kept])
    assert not any(module._forward_pre_hooks for module in recouple(converted).modules())


def test_decoder_has_plain_and_decoupled_scores():
    layer = nn.TransformerDecoderLayer(CHANNELS, HEADS, 16, dropout=0.0, batch_first=True).double()
    given = [torch.randn(SAMPLES, length, CHANNELS, dtype=torch.float64) for length in (QUERIES, KEYS)]
    causal = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES).double(), "tgt_is_causal": True}
    reports = []
    converted = decouple(layer, attention=PLAIN_SCORES, report=reports.append)
    assert reports[0].changed == ["self_attn", "multihead_attn"]
    torch.testing.assert_close(converted(*given, **causal), layer(*given, **causal))
    assert not torch.allclose(decouple(layer, attention="sphere-cos")(*given, **causal), layer(*given, **causal))


def test_nested_inputs_are_padded():
    module = decouple(attention(batch_first=True), attention="sphere-sqcos")
    parts = [torch.randn(length, CHANNELS, dtype=torch.float64) for length in (2, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    found, weights = module(nested, nested, nested, need_weights=False)
    assert weights is None
    for part, own in zip(parts, found.unbind(), strict=True):
        torch.testing.assert_close(own, module(part, part, part)[0])
    with pytest.raises(ValueError, match="nested tensors support only self-attention without masks: pad them"):
        module(nested, nested, nested, attn_mask=torch.zeros(4, 4))


# --- graphs ---


class Block(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.attention = decouple(attention(batch_first=True), attention=operator)

    def forward(self, tokens):
        return self.attention(tokens, tokens, tokens, need_weights=False)[0]


@pytest.mark.parametrize("operator", [COSINE, "log-sqcos+product"])
def test_compiled_exported_and_traced(operator):
    torch.compiler.reset()
    block, tokens = Block(operator), torch.randn(2, 5, CHANNELS, dtype=torch.float64)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(block, (tokens,)).module()
    for graph in (compiled, exported, torch.fx.symbolic_trace(block)):
        torch.testing.assert_close(graph(tokens), block(tokens))


# --- errors ---


BAD = {
    "attn_mask of shape [5, 4] must be [4, 5] or [6, 4, 5]": {"attn_mask": torch.zeros(5, 4).bool()},
    "attn_mask of shape [2, 4, 5] must be": {"attn_mask": torch.zeros(2, 4, 5)},
    "key_padding_mask of shape [3, 4] must be [3, 5]": {"key_padding_mask": torch.zeros(3, 4).bool()},
    "is_causal=True of nn.MultiheadAttention needs an attn_mask, not None": {"is_causal": True},
    "query of shape [4, 3, 7] must have 8 features": {"query": torch.zeros(4, 3, 7)},
    "must all have 2 or 3 dimensions, not [2, 3, 3]": {"query": torch.zeros(4, 8)},
    "batches of one size, key and value of one length, not 1 x 4, 3 x 5, 3 x 5": {"query": torch.zeros(4, 1, 8)},
    "of one length, not 3 x 4, 3 x 1, 3 x 5": {"key": torch.zeros(1, 3, 8)},
}


@pytest.mark.parametrize(("message", "changed"), BAD.items(), ids=lambda each: str(each)[:30])
def test_bad_inputs_raise_one_sentence(message, changed):
    module = decouple(attention(), attention="sphere-cos")
    query, key, value = inputs(module)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        module(**{"query": query, "key": key, "value": value, **changed})
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="attn_mask must be bool, True where a query must not attend"):
        module(query, key, value, attn_mask=torch.zeros(4, 5).byte())


def test_copies_keep_the_scores():
    module = decouple(attention(), attention=COSINE)
    given = inputs(module)
    torch.testing.assert_close(copy.deepcopy(module)(*given), module(*given))
