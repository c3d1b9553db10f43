"""The fused kernels compared with torch in float64: operators, constants, dtypes, mean norms, shapes and layouts."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_comparison import (
    DEVICE,
    HALVES,
    ON_GPU,
    TOLERANCE,
    alternating,
    assert_close,
    assert_same_bits,
    by_kernels,
    by_torch,
    check,
    cotangent_for,
    exact,
    expected,
    fused_operators,
    images,
    make_layer,
    new_memory_is_nan,
    one_of_each,
    parts_of,
    quiet_numpy,
    results,
)
from helpers.operators import operator_params
from torch import nn

import dcnet
from dcnet import Learnable, Operator, Radius
from dcnet.kernels.passes import BATCH_MEAN, NO_UPDATE, Passes, Settings
from dcnet.kernels.plan import Window, plan_of


@pytest.mark.parametrize("operator", operator_params(fused_operators()))
def test_every_operator(operator):
    check(make_layer(operator, padding=1, bias=False), images(1, 3, 4, 5))


def test_one_of_each_contains_every_part():
    assert set().union(*map(parts_of, one_of_each())) == set().union(*map(parts_of, fused_operators()))


@pytest.mark.parametrize(
    ("operator", "dtype", "bias"),
    alternating(one_of_each(), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]),
)
def test_dtypes_with_and_without_bias(operator, dtype, bias):
    check(make_layer(operator, padding=1, bias=bias, dtype=dtype), images(1, 3, 4, 5, dtype=dtype))


# --- constants ---


def with_device_functions(registry):
    return [part for part in registry.values() if part.device is not None]


def learning(part, per_channel):
    """The component with every constant learned; a radius has its own setting."""
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
def test_combined_negative_and_fixed_constants(operator):
    check(make_layer(operator, bias=False), images(1, 3, 5, 6))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["tanh-cos+product", "log-linear"])
def test_filters_in_float32_under_autocast(operator, dtype):
    """The interpreter has no autocast; the kernels get the input as autocast would cast it."""
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
def test_plain_convolutions_with_scaled_filters(operator, dtype):
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


def test_running_mean_over_several_batches():
    layer = make_layer("ball(radius=Radius(decay=0.6))-cos")
    double = exact(layer)
    # The warm-up of the decay ends with the 14th batch.
    for scale in (1, 3, 0.5, 2) * 4:
        x = scale * images(1, 3, 5, 6)
        by_kernels(layer, x)
        double(x.double())
        torch.testing.assert_close(layer.mean_norm.double(), double.mean_norm, rtol=1e-6, atol=0)
        assert layer.num_batches_tracked == double.num_batches_tracked


@quiet_numpy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0.0, 2.5])
def test_non_finite_batch_does_not_change_the_running_mean(before, bad):
    layer = make_layer("tanh-cos")
    layer.mean_norm.fill_(before)
    layer.num_batches_tracked.fill_(7)
    x = images(1, 3, 5, 6)
    x[0, 0, 0, 0] = bad
    by_kernels(layer, x)
    assert layer.mean_norm == before
    assert layer.num_batches_tracked == 7


def test_mean_norm_of_zero_restarts_for_any_count():
    layer = make_layer("tanh-cos")
    layer.num_batches_tracked.fill_(1000)
    check(layer, images(1, 3, 5, 6))
    assert layer.num_batches_tracked == 1


def test_running_mean_without_a_count_does_not_warm_up():
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


@pytest.mark.parametrize("operator", one_of_each())
def test_zero_patches_give_the_bias(operator):
    layer, x = make_layer(operator), images(1, 3, 9, 9)
    x[:, :, 3:6, 3:6] = 0
    assert (by_kernels(layer, x)[0, :, 3, 3] == layer.bias).all()


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_zero_patches_have_correct_gradients(eps):
    x = images(2, 3, 6, 6)
    x[0] = 0
    check(make_layer("log-sqcos+joint", padding=2, eps=eps, bias=False), x)


@quiet_numpy
@pytest.mark.parametrize("operator", one_of_each())
def test_tiny_patches_have_correct_gradients(operator):
    """The backward pass must also recover values from very small outputs."""
    check(make_layer(operator, bias=False, eps=1e-8), 1e-4 * images(1, 3, 5, 6))


def test_zero_filters_have_correct_gradients():
    layer = make_layer("tanh-cos+product")
    with torch.no_grad():
        layer.weight[0] = 0
    check(layer, images(2, 3, 5, 6))


@quiet_numpy
@pytest.mark.parametrize(
    ("operator", "norm", "dtype"),
    alternating(one_of_each(), [(1e15, torch.float32), (0.0, torch.float32), (1e-20, torch.bfloat16)]),
)
def test_extreme_norms_give_finite_results_and_gradients(operator, norm, dtype):
    layer = make_layer(operator, padding=1, bias=False, dtype=dtype)
    direction = torch.randn(1, 3, 4, 5, device=DEVICE)
    direction[:, :, :2] = layer.weight[0, :, 1:2, 1:2].detach()  # here the angle is often near zero
    x = (direction / direction.norm() * norm).to(dtype).requires_grad_()
    for name, value in results(by_kernels, layer, x, cotangent_for(layer, x)).items():
        assert value.isfinite().all(), name


@quiet_numpy
@pytest.mark.parametrize("operator", ["tanh-cos", "ball-sqcos", "sphere-linear", "sharp-relucos", "tanh-sigmoid+joint"])
def test_bounded_operators_are_finite_for_norms_beyond_float16(operator):
    layer = make_layer(operator, channels=16, padding=1, bias=False, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.fill_(0.1)
    x = torch.full((1, 16, 4, 5), 3e4, device=DEVICE, dtype=torch.float16, requires_grad=True)
    for name, value in results(by_kernels, layer, x, cotangent_for(layer, x)).items():
        assert value.isfinite().all(), name
    torch.testing.assert_close(by_kernels(layer, x), by_torch(layer, x), rtol=4e-3, atol=1e-3)
    with torch.no_grad():
        x[0, 3, 1, 1] = float("inf")
        assert by_kernels(layer.eval(), x)[0, :, 0, 0].isnan().all()


@quiet_numpy
@pytest.mark.parametrize("operator", one_of_each())
def test_nan_affects_only_its_own_patches(operator):
    """A kernel that computes max(0, NaN) would return a number."""
    layer, x = make_layer(operator).eval(), images(2, 3, 7, 7)
    x[1, 1, 2, 2] = math.nan
    assert torch.equal(by_kernels(layer, x).isnan(), exact(layer)(x.double()).isnan())


# --- frozen tensors ---


@pytest.mark.parametrize(
    "frozen",
    [
        ["input"],
        ["weight"],
        ["input", "weight"],
        ["input", "weight", "radius", "k"],
        ["input", "weight", "bias"],
        ["weight", "bias", "radius", "k"],
    ],
    ids=" and ".join,
)
def test_frozen_tensors_get_no_gradient(frozen):
    layer = make_layer("tanh-sigmoid(learnable=True)+product")
    for name in set(frozen) - {"input"}:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, images(2, 3, 5, 6), needs_input="input" not in frozen)


# --- uninitialized memory, and determinism ---


def run_from_the_same_start(layer, x, cotangent):
    return results(by_kernels, copy.deepcopy(layer), x, cotangent)


@pytest.mark.parametrize(
    ("operator", "size", "bias"), [*((name, 5, False) for name in one_of_each()[:3]), ("tanh-sigmoid", 40, True)]
)
def test_no_memory_is_read_before_it_is_written(operator, size, bias):
    """Three images give three programs, while kernels read four sums, the last of them masked."""
    layer, x = make_layer(operator, bias=bias, padding=1), images(3, 3, size, size).requires_grad_()
    cotangent = cotangent_for(layer, x)
    with new_memory_is_nan(fill=False):
        clean = run_from_the_same_start(layer, x, cotangent)
    with new_memory_is_nan():
        assert torch.empty(9, device=DEVICE).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert x.new_empty(9).isnan().all()
        poisoned = run_from_the_same_start(layer, x, cotangent)
    assert_same_bits(poisoned, clean)


@pytest.mark.parametrize(("layout", "bias"), [(torch.contiguous_format, True), (torch.channels_last, False)])
def test_results_are_deterministic(layout, bias):
    """Several programs compute partial sums, which must be added in a fixed order."""
    layer = make_layer("tanh-sigmoid(learnable=True)+product", bias=bias)
    x = images(3, 3, 31, 33).contiguous(memory_format=layout).requires_grad_()
    cotangent = cotangent_for(layer, x)
    first = run_from_the_same_start(layer, x, cotangent)
    assert_same_bits(run_from_the_same_start(layer, x, cotangent), first)


# The weighting depends on the constants, and the mean norm has a gradient.
OPERATOR = "tanh-sigmoid(learnable=True)+product"
LAST = torch.channels_last


WINDOWS = {
    "plain": {},
    "stride": {"stride": 2},
    "stride of a pair": {"stride": (2, 3), "padding": 1},
    "stride beyond the window": {"stride": 3, "kernel": 2},
    "padding": {"padding": 1},
    "padding of a pair": {"padding": (2, 0)},
    "padding beyond the window": {"padding": 2, "kernel": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "same with dilation": {"padding": "same", "dilation": (1, 2)},
    "dilation": {"dilation": 2, "padding": 1},
    "dilation and stride": {"dilation": (2, 1), "stride": (1, 2), "padding": (2, 1)},
    "1x1": {"kernel": 1},
    "1x1 with stride": {"kernel": 1, "stride": 2},
    "5x3": {"kernel": (5, 3), "padding": (2, 1)},
    "even": {"kernel": (2, 4), "padding": (1, 2)},
    "groups": {"channels": 4, "filters": 6, "groups": 2, "padding": 1},
    "depthwise": {"channels": 3, "filters": 3, "groups": 3, "padding": 1},
    "depthwise with more filters": {"channels": 2, "filters": 4, "groups": 2, "stride": 2},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    layer = make_layer(OPERATOR, **WINDOWS[name])
    check(layer, images(2, layer.in_channels, 7, 6))


@pytest.mark.parametrize("name", ["stride of a pair", "dilation and stride", "1x1", "5x3", "groups", "depthwise"])
def test_windows_with_channels_last(name):
    layer = make_layer(OPERATOR, **WINDOWS[name])
    check(layer, images(2, layer.in_channels, 7, 6).contiguous(memory_format=LAST))


SIZES = {
    "one image": (1, 3, 5, 5, {}),
    "one channel": (2, 1, 5, 6, {}),
    "one filter": (2, 3, 5, 6, {"filters": 1}),
    "five channels": (2, 5, 5, 6, {"filters": 5}),
    "one pixel": (2, 3, 1, 1, {"padding": 1}),
    "one row": (1, 3, 1, 9, {"padding": 1}),
    "one output": (2, 3, 3, 3, {}),
    "many positions": (3, 2, 41, 43, {"padding": 1}),
    "many channels": (2, 96, 3, 4, {"kernel": 1}),
    "more channels than a tile": (2, 2100, 2, 2, {"kernel": 1}),
    "more channels than any tile": (1, 4200, 1, 2, {"kernel": 1}),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    *shape, settings = SIZES[name]
    check(make_layer(OPERATOR, shape[1], **settings), images(*shape))


@pytest.mark.parametrize("name", ["one channel", "one pixel", "many positions", "more channels than a tile"])
def test_sizes_with_channels_last(name):
    *shape, settings = SIZES[name]
    check(make_layer(OPERATOR, shape[1], **settings), images(*shape).contiguous(memory_format=LAST))


def test_filters_in_several_tiles_and_chunks():
    """48 filters are three chunks of a power of two."""
    check(make_layer("tanh-cos", filters=48, kernel=1), images(2, 3, 9, 9).contiguous(memory_format=LAST))


def test_filters_in_several_tiles_chunks_and_groups():
    check(make_layer("tanh-cos", 2, filters=96, groups=2, kernel=1, bias=False), images(1, 2, 7, 7))


@pytest.mark.parametrize("size", [1, 2])
def test_window_larger_than_the_image_raises(size):
    with pytest.raises(RuntimeError):
        by_kernels(make_layer("tanh-cos", kernel=3), images(1, 3, size, size))


# --- layouts ---


def unaligned(x):
    """The same numbers at an unaligned address."""
    behind = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return behind.as_strided(x.shape, x.stride(), 1).copy_(x)


LAYOUTS = {
    "first": lambda x: x.contiguous(),
    "last": lambda x: x.contiguous(memory_format=LAST),
    "unaligned": unaligned,
    "unaligned last": lambda x: unaligned(x.contiguous(memory_format=LAST)),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "outside in": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
    "with gaps": lambda x: torch.stack([x, -x], -1)[..., 0],
    "part of the channels": lambda x: torch.cat([-x, x], 1)[:, x.shape[1] :],
    "the same again": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize(
    ("of_input", "of_filters"),
    [*((name, "first") for name in LAYOUTS), *(("last", name) for name in LAYOUTS), ("first", "outside in")],
)
def test_layouts_of_input_and_filters(of_input, of_filters):
    layer = make_layer(OPERATOR)
    layer.weight = nn.Parameter(LAYOUTS[of_filters](layer.weight.detach()))
    check(layer, LAYOUTS[of_input](images(2, 3, 5, 6)))


@pytest.mark.parametrize(
    ("of_gradient", "of_input"), [*((name, "first") for name in LAYOUTS), ("first", "last"), ("unaligned last", "last")]
)
def test_layouts_of_the_gradient(of_gradient, of_input):
    layer, x = make_layer(OPERATOR, bias=False), LAYOUTS[of_input](images(2, 3, 5, 6))
    check(layer, x, LAYOUTS[of_gradient](cotangent_for(layer, x)))


@pytest.mark.parametrize("of_input", ["first", "last"])
def test_gradient_expanded_from_one_number(of_input):
    """The gradient from `output.sum().backward()`: all strides are 0."""
    layer, x = make_layer(OPERATOR), LAYOUTS[of_input](images(2, 3, 5, 6))
    check(layer, x, torch.ones((), device=x.device).expand(cotangent_for(layer, x).shape))


@pytest.mark.parametrize("of_input", ["first", "last"])
@pytest.mark.parametrize("of_filters", ["first", "last"])
def test_output_has_the_layout_of_a_convolution(of_input, of_filters):
    layer, x = make_layer(OPERATOR), LAYOUTS[of_input](images(2, 3, 5, 6))
    layer.weight = nn.Parameter(LAYOUTS[of_filters](layer.weight.detach()))
    assert by_kernels(layer, x).stride() == F.conv2d(x, layer.weight).stride()


@pytest.mark.parametrize("name", ["bias", "radius", "k"])
def test_vectors_with_gaps(name):
    """A bias may be a column of a table."""
    layer = make_layer("tanh-sigmoid(k=Learnable(init=0.3,per_channel=True))", filters=4)
    table = torch.stack([layer.get_parameter(name).detach(), torch.full((4,), 9.0, device=layer.weight.device)], 1)
    setattr(layer, name, nn.Parameter(table[:, 0]))
    check(layer, images(2, 3, 5, 6))


def test_addresses_can_change_between_calls():
    """Kernels compiled for aligned addresses must not be used for others, or the reverse."""
    layer = make_layer(OPERATOR)
    for layout in ("first", "unaligned", "first", "unaligned"):
        check(layer, LAYOUTS[layout](images(2, 3, 5, 6)))


def test_kernels_add_few_partial_sums_for_any_number_of_groups(monkeypatch):
    """Triton compiles no sum over more than 2^20 numbers, and large ones slowly."""
    monkeypatch.setattr("dcnet.kernels.passes.multiprocessors", lambda device: 132)
    window = Window(512, 2048, (56, 56), 2048, (3, 3), (1, 1), (1, 1), (1, 1), 2048, channels_last=True)
    settings = Settings(torch.device("cpu"), torch.bfloat16, (9, 1, 3, 3), False, 1e-4, BATCH_MEAN, NO_UPDATE)
    passes = Passes(plan_of("tanh-cos"), window, settings)
    assert passes.mean_sums <= 2**14
    assert passes.back[True].grid[0] * passes.back[True].grid[1] == passes.mean_sums
