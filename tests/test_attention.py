"""Attention with decoupled scores, compared with plain loops, with torch's attention, and between its two paths."""

import math
from unittest import mock

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers.operators import combination_params, fixed_radius, operator_params, pairwise_operators
from torch import nn

import dcnet
import dcnet.attention
from dcnet.attention import COSINE, DecoupledAttention, default_scale, separates
from dcnet.functional import decoupled_attention
from dcnet.optim import param_groups

RADIUS = 1.7
HEADS, QUERIES, KEYS, FEATURES = 4, 5, 3, 7
NAMES = [
    pytest.param(each.values, id=each.id, marks=each.marks)
    for each in combination_params(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
]
# One operator per path, and one with a factor of the key in each.
PATHS = ["sphere-cos", "log-cos+product", "sphere-sqcos", f"tanh(radius={RADIUS})-sigmoid+joint", "log-linear+product"]


def fixed(operator):
    return fixed_radius(operator, RADIUS)


def named(names):
    magnitude, angle, weighting = names
    return fixed(f"{magnitude}-{angle}" + ("" if weighting == "unweighted" else f"+{weighting}"))


def inputs(dtype=torch.float64, samples=2, heads=HEADS, key_heads=HEADS, norm=1.0):
    query = norm * torch.randn(samples, heads, QUERIES, FEATURES, dtype=dtype)
    key = norm * torch.randn(samples, key_heads, KEYS, FEATURES, dtype=dtype)
    return query, key, torch.randn(samples, key_heads, KEYS, 2, dtype=dtype)


def masks():
    """Masks of every kind: as an argument, and as numbers added to the scores [2, heads, queries, keys]."""
    allowed = torch.rand(2, 1, QUERIES, KEYS) > 0.3
    allowed[0, 0, 2] = False  # a query without any key
    added = torch.randn(HEADS, QUERIES, KEYS, dtype=torch.float64)
    infinite = added.clone().masked_fill(torch.rand(added.shape) > 0.7, -math.inf)
    infinite[1, 3] = -math.inf
    row = torch.tensor([True, False, True])
    return {"bool": allowed, "float": added, "infinite": infinite, "keys": row}


def as_numbers(mask):
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    return numbers.expand(2, HEADS, QUERIES, KEYS)


# --- scores compared with plain loops ---


@pytest.mark.parametrize("names", NAMES)
def test_every_operator_is_the_equation(names):
    query, key, value = inputs()
    found = decoupled_attention(query, key, value, scale=1.3, operator=named(names))
    expected = reference.attention(names, query, key, value, 1.3, rho=[RADIUS] * HEADS)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["bool", "float", "infinite", "keys"])
@pytest.mark.parametrize("names", [("log", "cos", "product"), ("log", "sqcos", "linear"), ("tanh", "linear", "joint")])
def test_masks(names, kind):
    mask, (query, key, value) = masks()[kind], inputs()
    numbers = as_numbers(mask) if mask.dtype == torch.bool else mask.expand(2, HEADS, QUERIES, KEYS)
    found = decoupled_attention(query, key, value, mask, scale=2.0, operator=named(names))
    expected = reference.attention(names, query, key, value, 2.0, numbers, rho=[RADIUS] * HEADS)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("names", [("ball", "cos", "product"), ("seg", "sigmoid", "linear"), ("tanh", "cos", "joint")])
def test_causal_grouped_queries_with_a_radius_per_head(names, key_heads):
    query, key, value = inputs(key_heads=key_heads)
    radii = torch.tensor([0.7, 1.3, 2.9, 0.4], dtype=torch.float64)
    magnitude = dcnet.magnitude.registry[names[0]](radius=dcnet.Radius(relative=False))
    op = dcnet.Operator(magnitude, names[1], names[2])
    stored = {"radius": (radii - 1e-4).sqrt()}
    found = decoupled_attention(
        query, key, value, is_causal=True, scale=2.0, enable_gqa=True, operator=op, constants=stored
    )
    expected = reference.attention(names, query, key, value, 2.0, causal=True, rho=radii.tolist())
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_other_constants_and_sums():
    query, key, value = inputs()
    op = "tanh(radius=2.0,scale=1.5)-sigmoid(k=0.6)"
    found = decoupled_attention(query, key, value, scale=3.0, operator=op)
    names = ("tanh", "sigmoid", "unweighted")
    expected = reference.attention(names, query, key, value, 3.0, rho=[2.0] * HEADS, alpha=1.5, k=0.6)
    torch.testing.assert_close(found, expected)
    total = decoupled_attention(query, key, value, operator="log&log-cos", scale=1.0)
    torch.testing.assert_close(total, decoupled_attention(query, key, value, operator="log-cos", scale=2.0))


# --- relation to torch's attention ---


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("weighting", ["linear", "joint", "product"])
def test_linear_magnitude_and_cosine_are_plain_attention(weighting, eps):
    query, key, value = inputs(key_heads=2)
    operator = f"linear-cos+{weighting}"
    for options in ({}, {"is_causal": True}, {"scale": 0.7}, {"attn_mask": masks()["float"]}):
        found = decoupled_attention(query, key, value, **options, enable_gqa=True, operator=operator, eps=eps)
        expected = F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=True)
        # Only the product weighting computes a norm: h(||k||) / ||k|| rounds.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sphere_is_cosine_attention():
    query, key, value = inputs()
    found = decoupled_attention(query, key, value, scale=10.0, operator="sphere-cos", eps=0.0)
    cosines = F.cosine_similarity(query.unsqueeze(-2), key.unsqueeze(-3), dim=-1)
    torch.testing.assert_close(found, (10 * cosines).softmax(-1) @ value)


@pytest.mark.parametrize(
    ("operator", "power"),
    [
        ("sphere-cos", 1),
        ("tanh(radius=1.0)-sqcos+joint", 1),
        ("ball(radius=1.0)-cos+product", 1),
        ("linear-cos", 0),
        ("tanh(radius=1.0)-cos+linear", 0),
        ("linear-cos+linear", -1),
        ("log-linear+joint", -1),
        ("mix-cos+product", -1),
    ],
)
def test_default_scale_counts_the_norms_without_bound(operator, power):
    query, key, value = inputs()
    assert default_scale(dcnet.Operator.parse(operator), FEATURES) == pytest.approx(FEATURES ** (power / 2))
    found = decoupled_attention(query, key, value, operator=operator)
    explicit = decoupled_attention(query, key, value, scale=FEATURES ** (power / 2), operator=operator)
    torch.testing.assert_close(found, explicit)


@pytest.mark.parametrize("operator", ["sphere-cos", "linear-cos", "linear-cos+linear", "linear-cos+product"])
@pytest.mark.parametrize("features", [16, 256])
def test_default_scale_gives_scores_of_about_one(operator, features, monkeypatch):
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, *_, scale, **__: seen.append(scale * q @ k.mT))
    decoupled_attention(*(torch.randn(50, features) for _ in range(3)), operator=operator)
    assert seen[0].std().item() == pytest.approx(1, rel=0.15)


# --- both paths ---


def test_path_of_each_operator():
    parse = dcnet.Operator.parse
    assert all(
        separates(parse(spec)) for spec in ("sphere-cos", "tanh-cos+product", "log-cos+linear", "linear-cos+joint")
    )
    assert not any(
        separates(parse(spec)) for spec in ("sphere-sqcos", "log-cos+joint", "linear-relucos", "sphere-linear")
    )


@pytest.mark.parametrize("magnitude", dcnet.magnitude.registry)
@pytest.mark.parametrize("weighting", ["unweighted", "linear", "product"])
@pytest.mark.parametrize("kind", ["bool", "keys", "causal"])
def test_both_paths_agree(magnitude, weighting, kind, monkeypatch):
    given = [each.requires_grad_() for each in inputs(key_heads=2)]
    mask = None if kind == "causal" else masks()[kind]
    settings = {
        "attn_mask": mask,
        "is_causal": mask is None,
        "enable_gqa": True,
        "operator": named((magnitude, "cos", weighting)),
    }
    results = []
    for path in (True, False):
        monkeypatch.setattr(dcnet.attention, "separates", lambda op, path=path: path)
        found = decoupled_attention(*given, **settings)
        results.append((found.detach(), *torch.autograd.grad(found.square().sum(), given)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


# --- gradients ---


@pytest.mark.parametrize("operator", operator_params())
def test_gradients(operator):
    op = fixed(operator)
    learned = {
        name: (slot.initial(2).double() * torch.linspace(0.9, 1.2, slot.size).double())
        for name, slot in op.learned.items()
    }
    query, key, value = torch.randn(1, 2, 3, 3), torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2, 1)
    given = [each.double().requires_grad_() for each in (query, key, value, *learned.values())]

    def call(query, key, value, *stored):
        constants = dict(zip(learned, stored, strict=True))
        return decoupled_attention(query, key, value, enable_gqa=True, operator=op, constants=constants)

    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize(
    "operator",
    [
        COSINE,
        "seg(slope=Learnable(init=0.4,per_channel=True),radius=Radius(relative=False))-sigmoid(learnable=True)+product",
    ],
)
@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_gradients_of_constants_per_head_with_masks(operator, kind):
    module = DecoupledAttention(2, operator=operator, dtype=torch.float64)
    mask = {"bool": torch.tensor([[True, False], [False, False], [True, True]]), "causal": None}
    mask["float"] = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    names, values = zip(*module.named_parameters(), strict=True)
    query, key, value = (torch.randn(1, 2, size, 3, dtype=torch.float64, requires_grad=True) for size in (3, 2, 2))

    def call(query, key, value, mask, *values):
        arguments = (query, key, value, mask, 0.0, mask is None)
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), arguments)

    assert torch.autograd.gradcheck(call, (query, key, value, mask[kind], *values))


# --- numbers: extreme norms, half precision, dropout ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", operator_params())
def test_extreme_norms_give_finite_results_and_gradients(operator, dtype):
    weighted = dcnet.Operator.parse(operator).weighted
    for norm in (0.0, 1e-20, 1e6 if weighted else 1e15):
        given = [each.to(dtype).requires_grad_() for each in inputs(torch.float32, norm=norm)]
        for mask in (None, masks()["bool"], masks()["infinite"].to(dtype)):
            found = decoupled_attention(*given, mask, operator=fixed(operator))
            assert found.isfinite().all(), norm
            for gradient in torch.autograd.grad(found.float().sum(), given):
                assert gradient.isfinite().all(), norm


@pytest.mark.parametrize("operator", operator_params())
def test_zero_queries_attend_evenly(operator):
    query, key, value = inputs()
    found = decoupled_attention(query * 0, key, value, operator=fixed(operator), eps=0.0)
    torch.testing.assert_close(found, value.mean(-2, keepdim=True).expand_as(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", pairwise_operators())
def test_half_precision_is_close_to_float32(operator, dtype):
    query, key, value = (each.to(dtype) for each in inputs(torch.float32))
    mask = torch.randn(QUERIES, KEYS, dtype=torch.float64)
    found = decoupled_attention(query, key, value, mask, operator=fixed(operator))
    expected = decoupled_attention(query.float(), key.float(), value.float(), mask, operator=fixed(operator))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "operator", ["sphere-cos", "tanh(radius=2.0)-cos+product", "sphere-sqcos", "ball(radius=2.0)-cos+joint"]
)
def test_bounded_operators_are_exact_for_inner_products_beyond_float16(operator):
    query, key, value = (each.half() for each in inputs(torch.float32, norm=5e3))
    found = decoupled_attention(query, key, value, operator=operator)
    expected = decoupled_attention(query.float(), key.float(), value.float(), operator=operator)
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("operator", PATHS)
def test_autocast(operator):
    query, key, value = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoupled_attention(query.bfloat16(), key, value, operator=operator)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), decoupled_attention(query, key, value, operator=operator), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("operator", PATHS)
def test_dropout_keeps_the_expectation(operator):
    query, key, value = inputs(samples=1)
    expected = decoupled_attention(query, key, value, operator=operator)
    assert torch.equal(decoupled_attention(query, key, value, operator=operator), expected)
    many = [each.expand(4000, -1, -1, -1) for each in (query, key, value)]
    found = decoupled_attention(*many, dropout_p=0.3, operator=operator)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found.mean(0, keepdim=True), expected, rtol=0, atol=0.12)
    assert (found[:, 0, 0] == 0).all(-1).double().mean().item() == pytest.approx(0.3**KEYS, abs=0.015)


# --- shapes ---


@pytest.mark.parametrize("operator", PATHS)
def test_leading_dimensions_broadcast(operator):
    query, key, value = inputs()
    apart = torch.stack([decoupled_attention(each, key[0], value[0], operator=operator) for each in query])
    torch.testing.assert_close(decoupled_attention(query, key[:1], value[:1], operator=operator), apart)
    torch.testing.assert_close(decoupled_attention(query, key[0], value[0], operator=operator), apart)
    deep = decoupled_attention(query[:, None], key[None, :1], value[None, :1], operator=operator)
    torch.testing.assert_close(deep, apart[:, None])
    alone = decoupled_attention(query[0, 1], key[0, 1], value[0, 1], operator=operator)
    torch.testing.assert_close(alone, apart[0, 1])


@pytest.mark.parametrize("operator", PATHS)
def test_empty_batches_and_queries(operator):
    query, key, value = inputs()
    assert decoupled_attention(query[:0], key[:0], value[:0], operator=operator).shape == (0, HEADS, QUERIES, 2)
    assert decoupled_attention(query[:, :, :0], key, value, operator=operator).shape == (2, HEADS, 0, 2)


# --- the module ---


SPLINE = f"tanh(radius={RADIUS})-spline+joint"
MODULES = [COSINE, "sphere(learnable=True)-cos", "ball(radius=Radius(relative=False))-sigmoid(learnable=True)", SPLINE]


@pytest.mark.parametrize("operator", MODULES)
def test_module_equals_the_function(operator):
    module, (query, key, value) = DecoupledAttention(HEADS, operator=operator).double(), inputs(key_heads=2)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    stored = {name: value.detach() for name, value in module.state_dict().items()}
    mask = masks()["bool"]
    found, expected = (
        call(query, key, value, mask, enable_gqa=True, **options)
        for call, options in ((module, {}), (decoupled_attention, {"operator": operator, "constants": stored}))
    )
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_state_of_the_module():
    module = DecoupledAttention(
        3, operator="tanh(radius=Radius(init=2.0,relative=False),scale=Learnable(init=4.0))-cos"
    )
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {"scale": (1,), "radius": (3,)}
    assert module.constants()["radius"].tolist() == pytest.approx([2.0] * 3)
    assert module.constants()["scale"].tolist() == pytest.approx([4.0])
    assert module.radius.tolist() == pytest.approx([math.sqrt(2 - 1e-4)] * 3)
    nn.init.zeros_(module.radius)
    module.reset_parameters()
    assert module.constants()["radius"].tolist() == pytest.approx([2.0] * 3)
    assert "3, operator='tanh(" in repr(module)
    assert "scale=8.0" in repr(DecoupledAttention(operator="sphere-cos", scale=8.0))
    assert DecoupledAttention(2, dtype=torch.bfloat16, device="meta").scale.dtype == torch.bfloat16


def test_fixed_scale_of_the_module():
    query, key, value = inputs()
    found = DecoupledAttention(operator="sphere-cos", scale=8.0)(query, key, value)
    torch.testing.assert_close(found, decoupled_attention(query, key, value, scale=8.0, operator="sphere-cos"))


def test_scale_of_a_call_replaces_that_of_the_module():
    query, key, value = inputs()
    found = DecoupledAttention(operator="sphere-cos", scale=8.0)(query, key, value, scale=2.0)
    torch.testing.assert_close(found, decoupled_attention(query, key, value, scale=2.0, operator="sphere-cos"))


@pytest.mark.parametrize("operator", PATHS)
@pytest.mark.parametrize("kind", ["bool", "float", "infinite", "keys"])
def test_weights_of_the_values(operator, kind):
    module, (query, key, value), mask = DecoupledAttention(operator=operator), inputs(), masks()[kind]
    weights = module.weights(query, key, mask)
    assert weights.shape == (2, HEADS, QUERIES, KEYS)
    torch.testing.assert_close(weights @ value, module(query, key, value, mask))
    torch.testing.assert_close(module.weights(query, key) @ value, module(query, key, value))


def test_weights_of_another_number_of_heads_are_an_error():
    query, key, _ = inputs()
    with pytest.raises(ValueError, match=r"query of shape \[2, 3, 5, 7\] must have 4 heads, its third-last size"):
        DecoupledAttention(HEADS).weights(query[:, :3], key)


def test_constants_of_the_module_do_not_decay():
    module = nn.Sequential(DecoupledAttention(HEADS))
    decaying, others = param_groups(module, 0.1, named=True)
    assert decaying["param_names"] == []
    assert others["param_names"] == ["0.scale"]


class Block(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.attention = DecoupledAttention(HEADS, operator=operator, dtype=torch.float64)

    def forward(self, query, key, value):
        return self.attention(query, key, value, is_causal=True)


GRAPHS = [COSINE, "log-cos+product", f"tanh(radius={RADIUS})-sigmoid(learnable=True)+joint"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", GRAPHS)
def test_compiled_module(operator, dynamic):
    torch.compiler.reset()  # all blocks have the same code, which is compiled a few times only
    block = Block(operator)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for samples in (2, 3):
        given = inputs(samples=samples)
        torch.testing.assert_close(compiled(*given), block(*given))


@pytest.mark.parametrize("operator", GRAPHS)
def test_exported_and_traced_module(operator):
    block, given, other = Block(operator), inputs(), inputs(samples=3)
    sizes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},) * 3
    exported = torch.export.export(block, given, dynamic_shapes=sizes).module()
    for graph in (exported, torch.fx.symbolic_trace(block)):
        torch.testing.assert_close(graph(*other), block(*other))
    alone = torch.fx.symbolic_trace(block.attention)
    torch.testing.assert_close(alone(*other), block.attention(*other))


# --- errors ---


BAD = {
    "[2, 4, 3, 7] must have 6 features": {"query": torch.zeros(2, 4, 5, 6)},
    "[2, 4, 2, 2] must have 3 rows": {"value": torch.zeros(2, 4, 2, 2)},
    "shapes [2, 3, 5, 7], [2, 4, 3, 7], [2, 4, 3, 2] must have leading": {"query": torch.zeros(2, 3, 5, 7)},
    "shapes [2, 4, 5, 7], [2, 4, 3, 7], [3, 4, 3, 2] must have leading": {"value": torch.zeros(3, 4, 3, 2)},
    "key and value, 4 and 4, must be equal and divide those of the query, 6": {
        "query": torch.zeros(2, 6, 5, 7),
        "enable_gqa": True,
    },
    "key and value, 4 and 2, must be equal": {"value": torch.zeros(2, 2, 3, 2), "enable_gqa": True},
    "enable_gqa needs [..., heads, length, features], not a query of [5, 7]": {
        "query": torch.zeros(5, 7),
        "enable_gqa": True,
    },
    "query must be [..., heads, length, features], not [7]": {"query": torch.zeros(7)},
    "attn_mask of shape [5, 4] must broadcast to the scores, [2, 4, 5, 3]": {"attn_mask": torch.ones(5, 4).bool()},
    "attn_mask of shape [1, 2, 4, 5, 3] must": {"attn_mask": torch.ones(1, 2, 4, 5, 3)},
    "is_causal must be False with an attn_mask, here of shape [5, 3]": {
        "attn_mask": torch.ones(5, 3),
        "is_causal": True,
    },
    "dropout_p must be in [0, 1], not 1.5": {"dropout_p": 1.5},
    "scale must be finite, not nan": {"scale": math.nan},
    "eps must not be negative, not -1.0": {"eps": -1.0},
    "'tanh-cos' has a radius relative to the mean norm": {"operator": "tanh-cos"},
    "'conv' is torch's own layer": {"operator": "conv"},
    "learns no constant 'radius'": {"constants": {"radius": torch.ones(4)}},
    "'scale' has 3 numbers, but must have one, or one for each of 4 heads": {
        "operator": "sphere(learnable=True)-cos",
        "constants": {"scale": torch.ones(3)},
    },
    "'slopes' has 4 numbers, but must have 9": {
        "operator": "sphere-spline",
        "constants": {"slopes": torch.ones(4)},
    },
}
WRONG_TYPES = {
    "query must be a tensor, not list": {"query": [[1.0]]},
    "key must be a floating-point tensor, not torch.int64": {"key": torch.zeros(2, 4, 3, 7).long()},
    "must have one dtype, not torch.float32, torch.float64, torch.float32": {"key": torch.zeros(2, 4, 3, 7).double()},
    "attn_mask must be a tensor, not bool": {"attn_mask": True},
    "attn_mask must be bool, True where a query attends, or floating-point, not torch.uint8": {
        "attn_mask": torch.ones(5, 3).byte()
    },
    "is_causal must be True or False, not 1": {"is_causal": 1},
    "scale must be a number, not '8'": {"scale": "8"},
}


@pytest.mark.parametrize("operator", ["sphere-cos", "sphere-sqcos"])
@pytest.mark.parametrize(("message", "changed"), [*BAD.items(), *WRONG_TYPES.items()], ids=lambda each: str(each)[:40])
def test_bad_input_raises_one_sentence(message, changed, operator):
    query, key, value = inputs(torch.float32)
    given = {"query": query, "key": key, "value": value, "operator": operator, **changed}
    with pytest.raises(TypeError if message in WRONG_TYPES else ValueError) as error:
        decoupled_attention(**given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_nested_tensors_are_rejected():
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="query must not be a nested tensor: pad it"):
        decoupled_attention(nested, nested, nested, operator="sphere-cos")


def test_bad_modules():
    for message, given in {
        "learns a constant per head: num_heads must be a number, not None": {},
        "num_heads must be a whole number, 1 or more, not 0": {"num_heads": 0},
        "relative to the mean norm": {"num_heads": 2, "operator": "tanh-cos"},
        "eps must not be negative": {"num_heads": 2, "eps": -1.0},
        "scale must be finite": {"num_heads": 2, "scale": math.inf},
    }.items():
        with pytest.raises(ValueError, match=message):
            DecoupledAttention(**given)
    with pytest.raises(ValueError, match=r"query of shape \[2, 4, 5, 7\] must have 3 heads"):
        DecoupledAttention(3)(*inputs())


@pytest.mark.parametrize(
    ("operator", "eps", "count"),
    [("sphere-cos", 1e-4, 2), (COSINE, 1e-4, 2), ("sphere-cos", 0.0, 0), ("log-cos", 0.1, 1)],
)
def test_queries_and_keys_are_normalized_in_one_operation_each(operator, eps, count):
    """Unless eps is 0; a query whose magnitude depends on its norm needs the norm."""
    with mock.patch.object(F, "rms_norm", wraps=F.rms_norm) as normalize:
        DecoupledAttention(4, operator=operator, eps=eps)(*inputs())
    assert normalize.call_count == count
