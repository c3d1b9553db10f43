"""Bounds of operators, and the initial constants of layers."""

import pytest
import torch

import dcnet


@pytest.mark.parametrize(("weighting", "bound"), [("", 6.0), ("+joint", 6.0), ("+product", 18.0), ("+linear", None)])
def test_bound_is_positive_for_a_negative_scale(weighting, bound):
    operator = dcnet.Operator.parse(f"seg(scale=-2,slope=0,radius=3.0)-cos{weighting}")
    assert operator.properties().bound == bound
    x = 1e3 * torch.randn(50, 4)
    layer = dcnet.DecoupledLinear(4, 3, bias=False, operator=operator)
    assert layer(x).abs().max() <= (bound or torch.inf)


def test_relative_radius_has_no_fixed_bound():
    fixed = dcnet.Radius(init=3.0, learnable=False, per_channel=False)
    seg = dcnet.magnitude.Segmented(slope=0.0, radius=fixed)
    found = dcnet.Operator(seg, "cos").properties()
    assert (found.bounded, found.bound) == (True, None)


def test_only_relative_radii_have_a_running_mean():
    absolute = "tanh(radius=Radius(relative=False,decay=0.9))"
    layer = dcnet.DecoupledLinear(4, 3, operator=f"{absolute}-cos")
    assert layer.operator.decay is None
    assert "mean_norm" not in layer.state_dict()
    assert dcnet.Operator.parse(f"{absolute}&ball-cos").decay == 0.999


@pytest.mark.parametrize(
    ("spec", "name", "expected", "floor"),
    [
        ("tanh(radius=Radius(init=2.0,floor=0.5))-cos", "radius", 2.0, 0.5),
        ("tanh(scale=Learnable(init=3.0,floor=0.25))-cos", "scale", 3.0, 0.25),
        ("sphere-sigmoid(k=0.4,learnable=True)", "k", 0.4, 1e-4),
        ("seg(slope=Learnable(init=-0.5))-cos", "slope", -0.5, None),
    ],
)
def test_learned_constants_start_at_init_and_stay_above_their_floor(spec, name, expected, floor):
    layer = dcnet.DecoupledLinear(4, 3, operator=spec, dtype=torch.float64)
    found = layer.constants()[name]
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-6, atol=0)
    torch.nn.init.zeros_(getattr(layer, name))
    lowest = layer.constants()[name]
    assert torch.equal(lowest, torch.full_like(lowest, floor or 0.0))
