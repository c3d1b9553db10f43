"""The fused kernels where something is zero, tiny, huge, not a number, not asked for, or not yet written."""

import contextlib
import copy
import math

import pytest
import torch
from side_by_side import (
    DEVICE,
    assert_same_bits,
    by_kernels,
    by_torch,
    check,
    cotangent_for,
    exact,
    images,
    make_layer,
    one_of_each,
    quiet_numpy,
    results,
)


@pytest.mark.parametrize("operator", one_of_each())
def test_zero_patches_give_the_bias(operator):
    layer, x = make_layer(operator), images(1, 3, 9, 9)
    x[:, :, 3:6, 3:6] = 0
    assert (by_kernels(layer, x)[0, :, 3, 3] == layer.bias).all()


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_patches_of_zeros_have_right_gradients(eps):
    x = images(2, 3, 6, 6)
    x[0] = 0
    check(make_layer("log-sqcos+joint", padding=2, eps=eps, bias=False), x)


@quiet_numpy
@pytest.mark.parametrize("operator", one_of_each())
def test_faint_patches_have_right_gradients(operator):
    """What is told from outputs is told from very small ones, too."""
    check(make_layer(operator, bias=False, eps=1e-8), 1e-4 * images(1, 3, 5, 6))


def test_filters_of_zeros_have_right_gradients():
    layer = make_layer("tanh-cos+product")
    with torch.no_grad():
        layer.weight[0] = 0
    check(layer, images(2, 3, 5, 6))


@quiet_numpy
@pytest.mark.parametrize(("norm", "dtype"), [(0.0, torch.float32), (1e-20, torch.bfloat16), (1e15, torch.float32)])
@pytest.mark.parametrize("operator", one_of_each())
def test_extreme_norms_give_finite_results_and_gradients(operator, norm, dtype):
    layer = make_layer(operator, padding=1, bias=False, dtype=dtype)
    direction = torch.randn(1, 3, 4, 5, device=DEVICE)
    direction[:, :, :2] = layer.weight[0, :, 1:2, 1:2].detach()  # here the angle is often near zero
    x = (direction / direction.norm() * norm).to(dtype).requires_grad_()
    for name, value in results(by_kernels, layer, x, cotangent_for(layer, x)).items():
        assert value.isfinite().all(), name


@quiet_numpy
@pytest.mark.parametrize("operator", ["tanh-cos", "ball-sqcos", "sphere-linear", "sharp-relucos", "tanh-sigmoid+joint"])
def test_norms_that_float16_cannot_hold_give_bounded_operators_finite_results(operator):
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
def test_a_nan_stays_in_the_patches_that_hold_it(operator):
    """A kernel that takes the larger of zero and what is no number would make a number of it."""
    layer, x = make_layer(operator).eval(), images(2, 3, 7, 7)
    x[1, 1, 2, 2] = math.nan
    assert torch.equal(by_kernels(layer, x).isnan(), exact(layer)(x.double()).isnan())


# --- not everything has a gradient ---


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
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen):
    layer = make_layer("tanh-sigmoid(learnable=True)+product")
    for name in set(frozen) - {"input"}:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, images(2, 3, 5, 6), needs_input="input" not in frozen)


# --- memory and order ---


@contextlib.contextmanager
def new_memory_is_nan(fill=True):
    """torch fills new memory where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def run_from_the_same_start(layer, x, cotangent):
    return results(by_kernels, copy.deepcopy(layer), x, cotangent)


@pytest.mark.parametrize(
    ("operator", "size", "bias"), [*((name, 5, False) for name in one_of_each()), ("tanh-sigmoid", 40, True)]
)
def test_nothing_is_read_before_it_is_written(operator, size, bias):
    """With three images, and so three programs, where kernels read four sums, of which one is not there."""
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
def test_the_same_again_gives_the_same_bits(layout, bias):
    """With several programs, whose sums must always meet in the same order."""
    layer = make_layer("tanh-sigmoid(learnable=True)+product", bias=bias)
    x = images(3, 3, 31, 33).contiguous(memory_format=layout).requires_grad_()
    cotangent = cotangent_for(layer, x)
    first = run_from_the_same_start(layer, x, cotangent)
    assert_same_bits(run_from_the_same_start(layer, x, cotangent), first)
