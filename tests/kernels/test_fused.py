"""The fused kernels against torch in float64: every operator, every constant, every dtype, every mean norm."""

import dataclasses
import math

import pytest
import torch
from side_by_side import (
    HALVES,
    ON_GPU,
    TOLERANCE,
    assert_close,
    by_kernels,
    check,
    cotangent_for,
    exact,
    expected,
    fused_operators,
    images,
    make_layer,
    one_of_each,
    parts_of,
    quiet_numpy,
    results,
)

import dcnet
from dcnet import Learnable, Operator, Radius


@pytest.mark.parametrize("operator", fused_operators())
def test_every_operator(operator):
    check(make_layer(operator, padding=1, bias=False), images(1, 3, 4, 5))


def test_one_of_each_misses_no_part():
    assert set().union(*map(parts_of, one_of_each())) == set().union(*map(parts_of, fused_operators()))


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)],
)
@pytest.mark.parametrize("operator", one_of_each())
def test_dtypes_with_and_without_bias(operator, dtype, bias):
    check(make_layer(operator, padding=1, bias=bias, dtype=dtype), images(1, 3, 4, 5, dtype=dtype))


# --- constants ---


def with_device_functions(registry):
    return [part for part in registry.values() if part.device is not None]


def learning(part, per_channel):
    """The part with every number learned that can be; a radius says so itself."""
    numbers = {name: slot.init for name, slot in part.slots().items() if not isinstance(getattr(part, name), Radius)}
    return dataclasses.replace(part, **{name: Learnable(init, per_channel) for name, init in numbers.items()})


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("magnitude", with_device_functions(dcnet.magnitude.registry))
def test_learned_constants_of_magnitudes(magnitude, per_channel):
    check(make_layer(Operator(learning(magnitude(), per_channel), "sqcos", "product")), images(1, 3, 5, 6))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("angle", [g for g in with_device_functions(dcnet.angle.registry) if g().slots()])
def test_learned_constants_of_angles(angle, per_channel):
    check(make_layer(Operator("tanh", learning(angle(), per_channel)), bias=False), images(1, 3, 5, 6))


@pytest.mark.parametrize(
    "radius",
    [1.5, Radius(learnable=False), Radius(per_channel=False), Radius(relative=False), Radius(init=0.8, floor=0.3)],
    ids=str,
)
@pytest.mark.parametrize("magnitude", [h for h in with_device_functions(dcnet.magnitude.registry) if h().radii()])
def test_radii(magnitude, radius):
    check(make_layer(Operator(magnitude(radius=radius), "cos", "product"), bias=False), images(1, 3, 5, 6))


@pytest.mark.parametrize(
    "operator",
    [
        "tanh(learnable=True)-sigmoid(learnable=True)",
        "seg(learnable=True)-sigmoid(learnable=True)+product",
        "sharp(power=0.7,learnable=True)-power(p=1.3)+joint",
        "linear(scale=-0.7)-sqcos+product",
        "seg(slope=-0.5)-sigmoid(k=0.1)",
        "mix(log_scale=-3.0)-linear(delta=0.01)",
    ],
)
def test_constants_together_negative_and_fixed(operator):
    check(make_layer(operator, bias=False), images(1, 3, 5, 6))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["tanh-cos+product", "log-linear"])
def test_filters_in_float32_under_autocast(operator, dtype):
    """The interpreter has no autocast, but kernels that know what to do with the input that it casts."""
    layer, x = make_layer(operator, bias=False), images(1, 3, 5, 6, dtype=dtype).float().requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = expected(layer, x, cotangent)
    with torch.autocast("cuda", dtype, enabled=ON_GPU):
        found = results(by_kernels if ON_GPU else lambda layer, x: by_kernels(layer, x.to(dtype)), layer, x, cotangent)
    assert found["output"].dtype == dtype
    assert found["input"].dtype == found["weight"].dtype == torch.float32
    assert_close(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_eps(eps):
    check(make_layer("tanh-sigmoid+product", eps=eps), images(1, 3, 5, 6))


@pytest.mark.parametrize("operator", ["linear-cos", "linear(scale=-2.5)-cos", "linear-cos+linear"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_convolutions_with_filters_of_one_size(operator, dtype):
    check(make_layer(operator, dtype=dtype), images(1, 3, 5, 6, dtype=dtype))


# --- the mean norm ---


@pytest.mark.parametrize("mean_norm", [None, 0.0, 2.5])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", ["tanh-cos", "seg(radius=Radius(learnable=False))-sigmoid+product"])
def test_mean_norms(operator, training, mean_norm):
    layer = make_layer(operator).train(training)
    layer.register_buffer("mean_norm", None if mean_norm is None else torch.full_like(layer.mean_norm, mean_norm))
    check(layer, 0.4 * images(1, 3, 5, 6))
    if mean_norm is not None:
        assert (layer.mean_norm != mean_norm) == training


def test_running_mean_follows_batch_after_batch():
    layer = make_layer("ball(radius=Radius(decay=0.6))-cos")
    double = exact(layer)
    # From the 14th batch on the decay is 0.6 itself.
    for scale in (1, 3, 0.5, 2) * 4:
        x = scale * images(1, 3, 5, 6)
        by_kernels(layer, x)
        double(x.double())
        torch.testing.assert_close(layer.mean_norm.double(), double.mean_norm, rtol=1e-6, atol=0)
        assert layer.num_batches_tracked == double.num_batches_tracked


@quiet_numpy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0.0, 2.5])
def test_a_batch_that_is_not_finite_never_enters_the_running_mean(before, bad):
    layer = make_layer("tanh-cos")
    layer.mean_norm.fill_(before)
    layer.num_batches_tracked.fill_(7)
    x = images(1, 3, 5, 6)
    x[0, 0, 0, 0] = bad
    by_kernels(layer, x)
    assert layer.mean_norm == before
    assert layer.num_batches_tracked == 7


def test_a_mean_norm_set_to_zero_starts_over_whatever_its_count():
    layer = make_layer("tanh-cos")
    layer.num_batches_tracked.fill_(1000)
    check(layer, images(1, 3, 5, 6))
    assert layer.num_batches_tracked == 1


def test_a_running_mean_without_a_count_has_its_decay_from_the_start():
    layer = make_layer("ball(radius=Radius(decay=0.6))-cos")
    layer.num_batches_tracked = None
    double = exact(layer)
    for scale in (1, 3, 0.5):
        x = scale * images(1, 3, 5, 6)
        before = double.mean_norm.item()
        by_kernels(layer, x)
        double(x.double())
        torch.testing.assert_close(layer.mean_norm.double(), double.mean_norm, rtol=1e-6, atol=0)
    own = dcnet.functional.patch_norm(x.double(), (3, 3), (1, 1), [(0, 0)] * 2, (1, 1), eps=layer.eps).mean().item()
    assert layer.mean_norm.item() == pytest.approx(0.6 * before + 0.4 * own, rel=1e-5)
