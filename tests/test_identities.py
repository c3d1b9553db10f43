"""Identities between operators, bounds, and invariances."""

import pytest
import torch
import torch.nn.functional as F
from helpers.operators import all_operators, fixed_radius, operator_params
from hypothesis import given, settings
from hypothesis import strategies as st

import dcnet

X = torch.randn(3, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.randn(5, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def apply(operator, x=X, weight=W, eps=0.0):
    return dcnet.functional.decoupled_conv2d(x, weight, operator=operator, eps=eps, padding=1)


def test_linearly_weighted_linear_cos_is_a_convolution_at_any_eps():
    for eps in (0.0, 1e-4, 1.0):
        torch.testing.assert_close(apply("linear-cos+linear", eps=eps), F.conv2d(X, W, padding=1), rtol=0, atol=1e-13)


def test_every_weighted_linear_cos_is_a_convolution():
    for weighting in ("joint", "product"):
        torch.testing.assert_close(apply(f"linear-cos+{weighting}"), F.conv2d(X, W, padding=1))


def test_linearly_weighted_linear_relucos_is_a_convolution_and_relu():
    torch.testing.assert_close(apply("linear-relucos+linear"), F.conv2d(X, W, padding=1).relu())


@pytest.mark.parametrize("angle", dcnet.angle.registry)
def test_seg_with_equal_slopes_is_linear(angle):
    segmented = apply(f"seg(scale=0.7,slope=0.7)-{angle}")
    torch.testing.assert_close(segmented, apply(f"linear(scale=0.7)-{angle}"))


@pytest.mark.parametrize("angle", dcnet.angle.registry)
def test_flat_seg_is_ball(angle):
    flat = apply(f"seg(scale=0.2,slope=0.0,radius=5.0)-{angle}")
    torch.testing.assert_close(flat, apply(f"ball(radius=5.0)-{angle}"))


@pytest.mark.parametrize("angle", dcnet.angle.registry)
def test_mix_is_linear_plus_log(angle):
    parts = dcnet.magnitude.Linear(scale=0.7) + dcnet.magnitude.Log(scale=0.4)
    torch.testing.assert_close(apply(f"mix(scale=0.7,log_scale=0.4)-{angle}"), apply(dcnet.Operator(parts, angle)))


def test_bcos_and_sharpened_cosine_similarity_are_operators():
    n = dcnet.functional.patch_norm(X, (3, 3), (1, 1), [(1, 1)] * 2, (1, 1), eps=0.0)
    unit = W / W.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    cos = F.conv2d(X, unit, padding=1) / n
    bcos = cos.abs() * F.conv2d(X, unit, padding=1)
    torch.testing.assert_close(apply("linear-sqcos"), bcos)
    torch.testing.assert_close(apply("sphere-sqcos"), cos.sign() * cos.abs() ** 2)
    torch.testing.assert_close(apply("linear-power(p=2)"), bcos)
    torch.testing.assert_close(apply("tanh-power(p=1)"), apply("tanh-cos"))


@given(operator=st.sampled_from([name for name in all_operators() if "+" not in name]), scale=st.floats(1e-2, 1e4))
def test_unweighted_operators_ignore_the_norm_of_filters(operator, scale):
    torch.testing.assert_close(apply(operator, weight=W * scale), apply(operator), rtol=1e-9, atol=1e-9)


# The magnitude of a sphere is constant, so only a factor ||w|| changes it.
WEIGHTED = [name for name in all_operators() if "+linear" in name or ("+" in name and not name.startswith("sphere"))]


@pytest.mark.parametrize("operator", operator_params(WEIGHTED))
def test_weighted_operators_depend_on_the_norm_of_filters(operator):
    # Norms of about 0.6 and 0.1, where no magnitude has saturated yet.
    assert not torch.allclose(apply(operator, weight=W * 0.1), apply(operator, weight=W * 0.02))


@given(angle=st.sampled_from(list(dcnet.angle.registry)), scale=st.floats(1e-2, 1e4))
def test_sphere_ignores_the_norm_of_patches(angle, scale):
    torch.testing.assert_close(apply(f"sphere-{angle}", x=X * scale), apply(f"sphere-{angle}"), rtol=1e-9, atol=1e-9)


@given(
    name=st.sampled_from(["sphere", "ball", "tanh"]),
    scale=st.floats(1e-2, 1e3),
)
def test_relative_radius_makes_saturating_magnitudes_scale_invariant(name, scale):
    torch.testing.assert_close(apply(f"{name}-cos", x=X * scale), apply(f"{name}-cos"), rtol=1e-9, atol=1e-9)


BOUNDED = [name for name in all_operators() if dcnet.Operator.parse(name).properties().bounded]


def test_bounded_operators_match_the_paper():
    """Section 3.2.2, for any angle; a linear weighting is never bounded."""
    bounded = {name.split("-")[0] for name in BOUNDED}
    assert bounded & {"sphere", "ball", "tanh", "linear", "seg", "log", "mix"} == {"sphere", "ball", "tanh"}
    assert {name.partition("+")[2] for name in BOUNDED} == {"", "joint", "product"}
    assert dcnet.Operator.parse("seg(slope=0)-cos").properties().bounded


@settings(max_examples=300)
@given(
    operator=st.sampled_from([*BOUNDED, "seg(slope=0,scale=1.5)-linear", "seg(slope=0,scale=1.5)-cos+product"]),
    x_scale=st.floats(-12, 12).map(lambda power: 10**power),
    w_scale=st.floats(-6, 6).map(lambda power: 10**power),
    seed=st.integers(0, 1000),
)
def test_bounds_hold_for_any_input_and_filter(operator, x_scale, w_scale, seed):
    op = fixed_radius(operator, 2.5)
    bound = op.properties().bound
    assert bound is not None
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=generator) * x_scale
    w = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=generator) * w_scale
    # Some patches point exactly along a filter, where g reaches 1.
    x[0, :, :3, :3] = w[0] * x_scale
    for eps in (0.0, 1e-4):
        y = dcnet.functional.decoupled_conv2d(x, w, operator=op, eps=eps)
        assert y.abs().max().item() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("operator", operator_params([name for name in all_operators() if name not in BOUNDED]))
def test_unbounded_operators_grow(operator):
    op = fixed_radius(operator, 2.5)
    factor = 1e8
    small, large = apply(op, W[:1], W), apply(op, W[:1] * factor, W * factor)
    assert large.abs().max() > 2 * small.abs().max()


def test_identities_hold_approximately_with_eps():
    """At eps = 1e-4 the identities are off by about eps / (2 norm^2)."""
    n = dcnet.functional.patch_norm(X, (3, 3), (1, 1), [(1, 1)] * 2, (1, 1), eps=0.0).min()
    off = 1e-4 / (2 * n.item() ** 2)
    exact, approximate = apply("sphere-cos"), apply("sphere-cos", eps=1e-4)
    assert ((exact - approximate) / exact).abs().max() < 2 * off
