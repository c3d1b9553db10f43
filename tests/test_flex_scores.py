"""Attention by flex_attention: which calls take it, and its results compared with the formula step by step."""

import math
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention

import dcnet.attention
import dcnet.flex_scores
from dcnet.attention import COSINE
from dcnet.attention_inputs import Settings
from dcnet.flex_scores import depends_on_angle_alone, fits_flex
from dcnet.functional import decoupled_attention
from dcnet.operator import as_operator

ANGLES = ["sqcos", "linear", "sigmoid(k=0.4)", "relucos", "power"]
KINDS = ["none", "causal", "bool", "float", "grouped"]
SAMPLES, HEADS, QUERIES, KEYS, FEATURES = 2, 4, 9, 7, 16


def inputs(key_heads=HEADS, dtype=torch.float32, device="cpu"):
    shapes = [(HEADS, QUERIES, FEATURES), (key_heads, KEYS, FEATURES), (key_heads, KEYS, 2 * FEATURES)]
    return [torch.randn(SAMPLES, *shape, dtype=dtype, device=device) for shape in shapes]


def settings(kind, device="cpu"):
    allowed = torch.rand(SAMPLES, 1, QUERIES, KEYS, device=device) > 0.3
    allowed[0, 0, 2] = False  # a query without any key
    added = torch.randn(HEADS, QUERIES, KEYS, device=device)
    added[1, 3] = -math.inf
    mask = {"bool": allowed, "float": added}.get(kind)
    return {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": kind == "grouped"}


def results(call, given, learn):
    output = call(*given)
    return output, torch.autograd.grad(output.square().sum(), given) if learn else ()


def noting(seen):
    """A backend that notes the functions that a graph calls, and runs it."""

    def run(graph, given):
        seen.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph

    return run


def compare(operator, kind, backend, device="cpu", learn=True):
    """Compares outputs and gradients in compiled code with those of the formula in eager mode."""
    torch.compiler.reset()
    given = [each.requires_grad_(learn) for each in inputs(2 if kind == "grouped" else HEADS, device=device)]
    options, op = settings(kind, device), as_operator(operator)

    def call(query, key, value):
        return decoupled_attention(query, key, value, **options, operator=op)

    found = results(torch.compile(call, backend=backend, fullgraph=True), given, learn)
    torch.testing.assert_close(found, results(call, given, learn), rtol=1e-4, atol=1e-4)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Takes flex_attention in compiled code on the CPU, where torch rejects gradients but computes them."""
    compiling = torch.compiler.is_dynamo_compiling
    monkeypatch.setattr(dcnet.attention, "compiles_for_gpu", lambda query: compiling())
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("angle", ANGLES)
def test_outputs_and_gradients_are_those_of_the_formula(angle, kind, flex_on_cpu):
    compare(f"sphere(scale=1.5)-{angle}", kind, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("angle", ANGLES)
def test_compiled_kernels_of_the_cpu(angle, kind, flex_on_cpu):
    compare(f"sphere-{angle}", kind, "inductor", learn=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("angle", ANGLES)
def test_compiled_kernels_of_the_gpu(angle, kind, learn, monkeypatch):
    monkeypatch.setattr(dcnet.flex_scores, "ENABLED", True)
    compare(f"sphere-{angle}", kind, "inductor", "cuda", learn)


@pytest.mark.parametrize(("operator", "flex"), [("sphere-sqcos", True), ("log-sqcos", False), ("sphere-cos", False)])
def test_compiled_graph_has_flex_attention(operator, flex, flex_on_cpu):
    torch.compiler.reset()
    seen, op = [], as_operator(operator)
    call = torch.compile(lambda *given: decoupled_attention(*given, operator=op), backend=noting(seen))
    call(*inputs())
    assert ("flex_attention" in seen) == flex


def test_eager_mode_and_export_take_the_formula(flex_on_cpu, monkeypatch):
    monkeypatch.setattr(dcnet.attention, "attend_flex", None)
    decoupled_attention(*inputs(), operator="sphere-sqcos")
    monkeypatch.setattr(dcnet.flex_scores, "ENABLED", True)
    assert not dcnet.flex_scores.compiles_for_gpu(inputs()[0])


def test_flex_attention_is_off_by_default(monkeypatch):
    query, compiling = mock.Mock(is_cuda=True), mock.patch("torch.compiler.is_dynamo_compiling", return_value=True)
    with compiling:
        assert not dcnet.flex_scores.compiles_for_gpu(query)
        monkeypatch.setattr(dcnet.flex_scores, "ENABLED", True)
        assert dcnet.flex_scores.compiles_for_gpu(query)


def test_operators_that_depend_on_the_angle_alone():
    alone = ["sphere-sqcos", "sphere(scale=3.0)-linear", "sphere&sphere-power"]
    others = ["log-sqcos", "sphere-sqcos+linear", "sphere-sigmoid(learnable=True)", "sphere-spline", COSINE]
    assert all(depends_on_angle_alone(as_operator(spec)) for spec in alone)
    assert not any(depends_on_angle_alone(as_operator(spec)) for spec in others)


def fits(changes=None, operator="sphere-sqcos", given=None, **options):
    query, key, value = given or inputs(**(changes or {}))
    return fits_flex(query, key, value, Settings(**options), as_operator(operator))


def test_calls_that_fit():
    assert fits()
    assert fits(changes={"dtype": torch.bfloat16})
    assert fits(attn_mask=torch.ones(QUERIES, KEYS), operator="sphere-linear")
    assert fits(changes={"key_heads": 2}, enable_gqa=True)


def test_calls_that_take_the_formula():
    query, key, value = inputs()
    assert not fits(operator="log-sqcos")
    assert not fits(dropout_p=0.1)
    assert not fits(attn_mask=torch.ones(QUERIES, KEYS, requires_grad=True))
    assert not fits(changes={"dtype": torch.float64})
    assert not fits(changes={"key_heads": 1})
    assert not fits(given=(query, key, value.bfloat16()))
    assert not fits(given=(query[0], key[0], value[0]))
    assert not fits(given=(query, key[:1], value[:1]))
    assert not fits(given=(query[..., :8], key[..., :8], value))
    assert not fits(given=(query, key, value[..., :8]))
    assert not fits(given=(query[:, :, :0], key, value))
