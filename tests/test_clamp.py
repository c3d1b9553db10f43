"""Slopes at the limits of clamped functions, which do not depend on the gradient of torch's `clamp`."""

import math

import pytest
import torch

import dcnet
import dcnet.clamp as limits
from dcnet.losses.cosine_margins import SphereFace2, monotone_cosine

_clamp = torch.Tensor.clamp


def flat_clamp(x, min=None, max=None):
    """`clamp` with gradient 0 at its limits, as in torch 2.15."""
    limited = _clamp(x.detach(), min, max)
    return torch.where(
        (x > -math.inf if min is None else x > min) & (x < math.inf if max is None else x < max), x, limited
    )


@pytest.fixture(params=["of this torch", "of 2.15"], autouse=True)
def clamp(request, monkeypatch):
    """Runs every test with the gradient of this torch, and with the one of torch 2.15."""
    if request.param == "of 2.15":
        monkeypatch.setattr(torch.Tensor, "clamp", flat_clamp)


def slope(function, at):
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(function(x), x)
    return found.item()


SLOPES = torch.tensor([0.4, 1.3, 0.7, 2.1, 0.9], dtype=torch.float64)
SIZE = max((0.7 + 2.1) / 2 + (2.1 + 0.9) / 2, (0.7 + 1.3) / 2 + (1.3 + 0.4) / 2)
ANGLES = {
    "cos": (dcnet.angle.Cosine().value, 1.0, 1.0),
    "sqcos": (dcnet.angle.SquareCosine().value, 2.0, 2.0),
    "relucos": (dcnet.angle.ReluCosine().value, 0.0, 1.0),
    "power": (dcnet.angle.Power(p=3.5).value, 3.5, 3.5),
    "linear": (dcnet.angle.Linear().value, 200 / math.pi, 200 / math.pi),
    # There are two segments on each side, so the slope with respect to the cosine is twice that of the knot.
    "spline": (lambda c: dcnet.angle.Spline(segments=4).value(c, SLOPES), 2 * 0.4 / SIZE, 2 * 0.9 / SIZE),
    "custom": (dcnet.angle.Custom(lambda c: c**3).value, 3.0, 3.0),
    "monotone_cosine": (lambda c: monotone_cosine(c, 4), 16.0, 16.0),
    "sphereface2": (SphereFace2(t=3.0)._similarity, 0.0, 3.0),
}


@pytest.mark.parametrize("name", ANGLES)
def test_slope_at_cosines_of_minus_one_and_one(name):
    function, left, right = ANGLES[name]
    assert slope(function, -1.0) == pytest.approx(left)
    assert slope(function, 1.0) == pytest.approx(right)


@pytest.mark.parametrize("name", ["power", "custom", "spline", "sphereface2"])
def test_slope_beyond_one_is_that_of_the_clamped_function(name):
    function, _, _ = ANGLES[name]
    assert slope(function, 1.0 + 1e-9) == pytest.approx(1.0 if name == "power" else 0.0)


def test_slope_at_a_fixed_radius_is_the_inner_slope():
    assert slope(lambda n: dcnet.magnitude.Ball(radius=2.0).value(n, 1.0, 2.0), 2.0) == 0.5
    assert slope(lambda n: dcnet.magnitude.Segmented(radius=2.0).value(n, 1.0, 0.25, 2.0), 2.0) == 1.0


def test_slope_between_equal_filters_is_not_zero():
    assert slope(lambda c: limits.at_least(2 - 2 * c, 0.0), 1.0) == -2.0


@pytest.mark.parametrize("learns", [True, False])
def test_values_match_clamp(learns):
    x = torch.tensor([-math.inf, -2.0, -1.0, 0.3, 1.0, 5.0, math.inf, math.nan], requires_grad=learns)
    for found, expected in {
        limits.at_most(x, 1.0): _clamp(x, max=1.0),
        limits.at_least(x, -1.0): _clamp(x, min=-1.0),
        limits.between(x, -1.0, 1.0): _clamp(x, -1.0, 1.0),
    }.items():
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
