"""Device functions compared with torch: the equation of each component and its derivatives."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from helpers.kernel_comparison import DEVICE, ON_GPU, quiet_numpy

import dcnet

pytestmark = quiet_numpy


@triton.jit
def evaluate(
    argument,
    constants,
    results,
    size,
    function: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
    fast: tl.constexpr,
    block: tl.constexpr,
):
    """Computes function(argument, *constants, fast) for every element."""
    i = tl.arange(0, block)
    there = i < size
    given = ()
    for k in tl.static_range(count):
        given = given + (tl.load(constants + k * size + i, mask=there, other=1.0),)  # noqa: RUF005
    found = function(tl.load(argument + i, mask=there, other=1.0), *given, fast)
    for k in tl.static_range(rows):
        tl.store(results + k * size + i, found[k] + tl.zeros([block], tl.float32), mask=there)


@triton.jit
def evaluate_weighting(norm, h, scale, results, size, function: tl.constexpr, block: tl.constexpr):
    """Computes function(norm, h, scale) for every element."""
    i = tl.arange(0, block)
    there = i < size
    found = function(
        tl.load(norm + i, mask=there, other=1.0),
        tl.load(h + i, mask=there, other=1.0),
        tl.load(scale + i, mask=there, other=1.0),
    )
    for k in tl.static_range(6):
        tl.store(results + k * size + i, found[k] + tl.zeros([block], tl.float32), mask=there)


def on_device(function, part, argument, constants, fast=False):
    """The value, and its derivatives with respect to argument and constants, from the device function."""
    names = list(part.slots())
    given = [constants[name] for name in names] + [torch.full_like(argument, x) for x in part.fixed_numbers()]
    stacked = torch.stack([argument, *given]).to(DEVICE, torch.float32)
    found = torch.full((2 + len(names), len(argument)), math.nan, device=DEVICE)
    block = 1 << (len(argument) - 1).bit_length()
    flags = {"function": function, "count": len(given), "rows": len(found), "fast": fast, "block": block}
    evaluate[(1,)](stacked[0].contiguous(), stacked[1:].contiguous(), found, len(argument), **flags)
    return found.cpu().double()


def by_autograd(value, argument, constants):
    """The same values, from torch in float64."""
    leaves = [tensor.clone().requires_grad_() for tensor in (argument, *constants.values())]
    output = value(leaves[0], **dict(zip(constants, leaves[1:], strict=True)))
    slopes = torch.autograd.grad(output.sum(), leaves, materialize_grads=True)
    return torch.stack([output.detach(), *slopes])


def as_float32(values):
    """Numbers representable in float32, in float64."""
    return torch.tensor(values).float().double()


def grid(arguments, part, values):
    """Every argument with every combination of the constants."""
    names = list(part.slots())
    rows = itertools.product(arguments.tolist(), *[values] * len(names))
    argument, *constants = torch.tensor(list(rows), dtype=torch.float64).T.float().double()
    return argument, dict(zip(names, constants, strict=True))


def variants(registry, *more):
    return [part() for part in registry.values() if part.device is not None] + [part for part in more if part.device]


# --- magnitudes ---

MAGNITUDES = variants(dcnet.magnitude.registry, dcnet.magnitude.Sharp(power=0.5), dcnet.magnitude.Sharp(power=3.0))
NORMS = as_float32([1e-19, 1e-10, 1e-4, 0.009, 0.011, 0.2, 0.3, 0.77, 1.3, 2.1, 5.5, 17.0, 333.0, 1e6])


@pytest.mark.parametrize("part", MAGNITUDES, ids=lambda part: part.spec())
def test_magnitudes(part):
    """Values are accurate relative to themselves for any norm, slopes relative to the largest of them."""
    n, constants = grid(NORMS, part, (0.31, 1.07, 2.6))
    wanted = by_autograd(part.value, n, constants)
    found = on_device(part.device, part, n, constants)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-5, atol=1e-37)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=2e-5, atol=1e-5)


# --- angles ---

ANGLES = variants(
    dcnet.angle.registry,
    dcnet.angle.Linear(delta=0.01),
    dcnet.angle.Sigmoid(delta=0.01),
    dcnet.angle.Power(p=1.0),
    dcnet.angle.Power(p=1.3),
    dcnet.angle.Power(p=7.0),
)
SIZES = (0.0, 1e-30, 1e-12, 1e-7, 1e-3, 0.12, 0.24, 0.26, 0.49, 0.51, 0.7, 0.9, 0.99, 0.9999, 0.999999, 1.0)
COSINES = as_float32([sign * size for size in SIZES for sign in (1, -1)])
# Near cosines of 1, the slope of the angle loses digits with 1 - cos^2, which is accurate to 1e-7 and at least 1e-4.
OF_SLOPES = {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.parametrize("part", ANGLES, ids=lambda part: part.spec())
def test_angles(part):
    cos, constants = grid(COSINES, part, (0.06, 0.3, 1.0, 3.0))
    wanted = by_autograd(part.value, cos, constants)
    found = on_device(part.device, part, cos, constants)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(found[1:], wanted[1:], **OF_SLOPES)


@pytest.mark.parametrize("part", [part for part in ANGLES if part.device_inverse], ids=lambda part: part.spec())
def test_inverses_of_angles(part):
    """From g back to the cosine, if g determines it, and to the slopes."""
    cos, constants = grid(COSINES, part, (0.06, 0.3, 1.0, 3.0))
    wanted = by_autograd(part.value, cos, constants)
    found = on_device(part.device_inverse, part, wanted[0], constants)
    assert ((found[0] - cos) * wanted[1]).abs().max() < 1e-5
    torch.testing.assert_close(found[1:], wanted[1:], **OF_SLOPES)


@pytest.mark.parametrize("part", ANGLES, ids=lambda part: part.spec())
def test_cosines_beyond_one_give_finite_and_close_results(part):
    """Rounding may give such cosines; the result is finite and accurate to the rounding error."""
    cos, constants = grid(as_float32([1.004, -1.004]), part, (0.06, 0.3, 3.0))
    found = on_device(part.device, part, cos, constants)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], part.value(cos, **constants), rtol=1e-6, atol=0)


# --- weightings ---


@pytest.mark.parametrize("name", [name for name, part in dcnet.weighting.registry.items() if part.device is not None])
def test_weightings(name):
    """a and b of a h(b n), and their derivatives with respect to ||w||, h(||w||) and the scale."""
    weighting = dcnet.weighting.registry[name]
    rows = list(itertools.product((0.01, 0.4, 3.0), (0.2, 1.0, -0.5), (0.3, 2.0, -1.5)))
    norm, h, scale = as_float32(rows).T.contiguous().requires_grad_().unbind()
    a = weighting.factor(norm, h, scale) + 0 * norm
    b = weighting.argument(norm, torch.ones_like(norm)) + 0 * norm
    by_norm, by_h, by_scale = torch.autograd.grad(a.sum(), (norm, h, scale), retain_graph=True, materialize_grads=True)
    (argument_by_norm,) = torch.autograd.grad(b.sum(), norm, materialize_grads=True)
    wanted = torch.stack([a, b, by_norm, argument_by_norm, by_h, by_scale]).detach()
    found = torch.full((6, len(rows)), math.nan, device=DEVICE)
    given = [tensor.detach().to(DEVICE, torch.float32).contiguous() for tensor in (norm, h, scale)]
    evaluate_weighting[(1,)](*given, found, len(rows), function=weighting.device, block=32)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=1e-37)


# --- hardware approximations ---


@pytest.mark.skipif(not ON_GPU, reason="approximations are instructions of a GPU")
@pytest.mark.parametrize("part", [*MAGNITUDES, *ANGLES], ids=lambda part: part.spec())
def test_fast_functions_are_good_enough_for_half_precision(part):
    arguments, values = (NORMS, (0.31, 1.07, 2.6)) if part in MAGNITUDES else (COSINES, (0.1, 0.3, 1.0))
    argument, constants = grid(arguments, part, values)
    wanted = on_device(part.device, part, argument, constants)
    found = on_device(part.device, part, argument, constants, fast=True)
    torch.testing.assert_close(found, wanted, rtol=2**-9, atol=2**-9)
    if isinstance(part, dcnet.angle.Angle) and part.device_inverse is not None:
        slow, fast = (on_device(part.device_inverse, part, wanted[0], constants, fast=fast) for fast in (False, True))
        torch.testing.assert_close(fast, slow, rtol=2**-8, atol=2**-8)
