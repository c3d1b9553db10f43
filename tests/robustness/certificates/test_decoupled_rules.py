"""Lipschitz constants of single layers, compared with Jacobians and differences in float64."""

import dataclasses
import math

import pytest
import torch
from helpers.operators import operator_params
from torch import nn
from torch.func import jacrev, vmap

import dcnet
from dcnet.robustness.certificates.certificate import lipschitz, output_bounds

FEATURES = 4
# The largest ratio of constant and largest Jacobian found, by angle; as in docs/robustness_bounds.md.
FACTORS = {"cos": 1.2, "relucos": 1.2, "linear": 1.8, "sigmoid": 2.5, "sqcos": 4, "power": 4, "spline": 4}


def learned(layer, seed=0):
    """The layer in float64, with different filter norms and constants per filter."""
    torch.manual_seed(seed)
    layer = layer.double().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "weight":
                size = torch.rand(len(parameter), *[1] * (parameter.dim() - 1), dtype=torch.float64)
                parameter.copy_(torch.randn_like(parameter) * size * 2)
            elif name != "bias":
                parameter.copy_(torch.rand_like(parameter) * 1.5 + 0.1)
        if "mean_norm" in layer._buffers:
            layer.mean_norm.fill_(1.7)
    return layer


def places(layer):
    """Inputs of many norms in directions that may be the worst: random ones, filters and their signs."""
    w = layer.weight.detach()
    directions = torch.cat([torch.randn(12, w.shape[1], dtype=torch.float64), w, -w, w.sign(), torch.ones_like(w[:1])])
    directions = directions / directions.norm(dim=1, keepdim=True)
    return torch.cat([directions * length for length in (0, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 1.7, 3, 10)])


def steepest(layer, x):
    """The largest quotients found, in l2 and linf."""
    jacobians = vmap(jacrev(layer))(x).detach()
    l2, linf = torch.linalg.matrix_norm(jacobians, 2).max(), jacobians.abs().sum(2).max()
    # Two angles have infinite slopes, which autograd limits and differences do not.
    for size in (1e-4, 1e-2, 1.0):
        step = torch.randn_like(x) * size
        moved = (layer(x + step) - layer(x)).detach()
        l2 = torch.maximum(l2, (moved.norm(dim=1) / step.norm(dim=1)).max())
        linf = torch.maximum(linf, (moved.abs().amax(1) / step.abs().amax(1)).max())
    return float(l2), float(linf)


@pytest.mark.parametrize("operator", operator_params())
@pytest.mark.parametrize(("filters", "eps"), [(1, 1e-4), (3, 0.5)])
def test_jacobians_of_every_operator_stay_below_the_lipschitz_constant(operator, filters, eps):
    layer = learned(dcnet.DecoupledLinear(FEATURES, filters, operator=operator, eps=eps))
    l2, linf = steepest(layer, places(layer))
    constants = [lipschitz(layer, [FEATURES], norm) for norm in ("l2", "linf")]
    assert l2 <= constants[0]
    assert linf <= constants[1]
    if filters == 1:
        assert constants[0] <= FACTORS[layer.operator.angle.name] * l2


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("ball(scale=3.0,radius=0.5)-cos", 6.0),
        ("tanh(scale=3.0,radius=0.5)-cos", 6.0),
        ("linear(scale=3.0)-cos", 3.0),
        ("sphere(scale=3.0)-cos", 300.0),
        ("seg(scale=3.0,slope=0.5,radius=2.0)-cos", 3.0),
        ("log(scale=3.0)-cos", 3.0),
        ("sphere(scale=3.0)&log(scale=2.0)-cos", 302.0),
    ],
)
def test_constant_with_cos_is_the_slope_of_the_magnitude_times_the_matrix_norm(operator, expected):
    layer = learned(dcnet.DecoupledLinear(6, 5, operator=operator))
    units = layer.weight.detach() / (layer.weight.detach().square().sum(1, keepdim=True) + 1e-4).sqrt()
    assert lipschitz(layer, [6]) == pytest.approx(expected * float(torch.linalg.matrix_norm(units, 2)))


def two_radii(magnitude):
    """Two orthogonal filters with radii 1 and 100."""
    radius = dcnet.Radius(relative=False, floor=1e-12)
    magnitude = dataclasses.replace(magnitude, radius=radius)
    layer = dcnet.DecoupledLinear(2, 2, False, operator=dcnet.Operator(magnitude, "cos"), eps=1e-12).double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
        layer.radius.copy_(torch.tensor([1.0, 10.0]))
        if "scale" in layer._parameters:
            layer.scale.copy_(torch.tensor([1.0, 10.0]))
    return layer


@pytest.mark.parametrize(
    ("magnitude", "squares", "expected"),
    [
        (dcnet.magnitude.Ball(dcnet.Learnable(1.0, per_channel=True, floor=1e-12)), [1 / 3, 2 / 3], 2 / math.sqrt(3)),
        (dcnet.magnitude.Segmented(scale=1.0, slope=-1.0), [1 / 2, 1 / 2], math.sqrt(2)),
    ],
    ids=["ball", "seg"],
)
def test_radii_per_filter_reach_the_factor_of_the_bound(magnitude, squares, expected):
    """Filters of norm 1 and slope 1 exceed 1 together where only one is beyond its radius."""
    layer = two_radii(magnitude)
    x = torch.tensor(squares, dtype=torch.float64).sqrt() * 1.000001
    reached = float(torch.linalg.matrix_norm(jacrev(layer)(x).detach(), 2))
    assert reached == pytest.approx(expected, rel=1e-3)
    assert reached <= lipschitz(layer, [2]) <= 1.001 * reached


def test_joint_weighting_reaches_the_factor_of_the_bound():
    """Two filters of almost equal norm, of which one is beyond its radius."""
    layer = dcnet.DecoupledLinear(2, 2, False, operator="ball(radius=1.0)-cos+joint", eps=1e-12).double().eval()
    layer.weight.data.copy_(torch.diag(torch.tensor([1.0, 0.999])))
    x = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).sqrt() * 1.0005
    reached = float(torch.linalg.matrix_norm(jacrev(layer)(x).detach(), 2))
    assert reached == pytest.approx(2 / math.sqrt(3), rel=2e-3)
    assert reached <= lipschitz(layer, [2]) <= 1.003 * reached


def test_linf_bound_is_reached_beyond_the_radius():
    """There the gradient is orthogonal to the patch, with an L1 norm of up to (||u||_1 + sqrt(d) ||u||) / 2."""
    layer = dcnet.DecoupledLinear(4, 1, False, operator="ball(radius=2.0)-cos", eps=1e-12).double().eval()
    u = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    layer.weight.data.copy_(u[None])
    worst = u - torch.full_like(u, 0.5)
    gradient = jacrev(layer)(worst / worst.norm() * 2.000001).detach()
    reached = float(gradient.abs().sum())
    assert reached == pytest.approx((1 + 2) / 2 / 2, rel=1e-3)
    assert reached <= lipschitz(layer, [4], "linf") <= 1.001 * reached


WINDOWS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "dilation": (1, 2)},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    {"kernel_size": 1},
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_convolution_bounds_are_close_to_the_norm_of_the_matrix(window):
    layer = nn.Conv2d(4, 6, **window).double()
    matrix = jacrev(lambda x: layer(x).flatten())(torch.zeros(4, 6, 5, dtype=torch.float64)).flatten(1).detach()
    l2, linf = float(torch.linalg.matrix_norm(matrix, 2)), float(matrix.abs().sum(1).max())
    loose = 1.6 if window.get("padding_mode") is None else 3
    assert l2 <= lipschitz(layer, [4, 6, 5]) <= loose * l2
    assert linf <= lipschitz(layer, [4, 6, 5], "linf") <= 1.3 * linf


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("operator", ["tanh-cos", "sphere-sqcos", "linear-cos", "ball-linear"])
def test_jacobians_of_decoupled_convolutions_stay_below_the_constant(window, operator):
    layer = learned(dcnet.DecoupledConv2d(4, 6, **window, operator=operator, eps=1e-2))
    for x in (torch.zeros(4, 6, 5), torch.randn(4, 6, 5) * 0.05, torch.randn(4, 6, 5)):
        x = x.double()
        matrix = jacrev(lambda x: layer(x).flatten())(x).flatten(1).detach()
        assert float(torch.linalg.matrix_norm(matrix, 2)) <= lipschitz(layer, [4, 6, 5])
        assert float(matrix.abs().sum(1).max()) <= lipschitz(layer, [4, 6, 5], "linf")


def test_overlap_of_patches_is_tight_for_constant_images():
    """One filter of ones at stride 1: each inner pixel is in nine patches."""
    layer = dcnet.DecoupledConv2d(1, 1, 3, bias=False, operator="ball(radius=50.0)-cos").double().eval()
    nn.init.ones_(layer.weight)
    matrix = jacrev(lambda x: layer(x).flatten())(torch.zeros(1, 16, 16, dtype=torch.float64)).flatten(1).detach()
    reached = float(torch.linalg.matrix_norm(matrix, 2))
    assert reached <= lipschitz(layer, [1, 16, 16]) <= 1.1 * reached


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.MaxPool2d(3, stride=1, dilation=2, ceil_mode=True),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.AvgPool2d(4, stride=3, ceil_mode=True),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d((2, 1)),
        nn.BatchNorm2d(3),
        nn.PReLU(3),
        nn.LeakyReLU(-2.0),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.ReLU(),
    ],
    ids=str,
)
def test_bounds_of_modules_without_filters(module):
    module = module.double().eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 3 + 0.1)
    x = torch.randn(3, 8, 7, dtype=torch.float64)
    matrix = jacrev(lambda x: module(x[None]).flatten())(x).flatten(1).detach()
    l2, linf = float(torch.linalg.matrix_norm(matrix, 2)), float(matrix.abs().sum(1).max())
    if isinstance(module, nn.MaxPool2d):
        l2 = max(l2, 1.0)  # the windows of an image need not share their largest value
    assert l2 - 1e-9 <= lipschitz(module, [3, 8, 7]) <= max(3 * l2, 1)
    assert linf - 1e-9 <= lipschitz(module, [3, 8, 7], "linf") <= max(1.001 * linf, 1)


@pytest.mark.parametrize("operator", ["sphere-cos", "ball-relucos", "tanh-linear", "sharp-sqcos", "tanh-spline+joint"])
def test_outputs_of_bounded_layers_stay_within_their_bounds(operator):
    layer = learned(dcnet.DecoupledConv2d(2, 3, 3, padding=1, operator=operator))
    low, high = output_bounds(layer, [2, 5, 5])
    for size in (0.1, 1, 1e3, 1e8):
        y = layer(torch.randn(20, 2, 5, 5, dtype=torch.float64) * size).detach().transpose(0, 1).flatten(1)
        assert (y.amin(1) >= low).all()
        assert (y.amax(1) <= high).all()
    w = layer.weight.detach()[None, 0, :, :, :] * 1e3
    far = nn.functional.pad(w, [1, 1, 1, 1])
    assert layer(far)[0, 0, 2, 2] >= high[0] - 0.2 * (high[0] - low[0])


def test_output_bounds_include_padding():
    first = dcnet.DecoupledConv2d(1, 1, 1, operator="sphere-cos").double()
    second = nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
    nn.init.constant_(first.bias, 10.0)
    nn.init.ones_(second.weight)
    low, high = output_bounds(nn.Sequential(first, second), [1, 4, 4])
    y = second(first(torch.randn(1, 1, 4, 4, dtype=torch.float64))).detach()
    assert low[0] <= y.min()
    assert y.max() <= high[0] == pytest.approx(99)


@pytest.mark.parametrize("operator", ["linear-cos", "log-cos", "seg-cos", "mix-sqcos"])
def test_unbounded_layers_have_infinite_output_bounds(operator):
    low, high = output_bounds(dcnet.DecoupledLinear(3, 2, operator=operator), [3])
    assert torch.equal(high, -low)
    assert math.isinf(high[0])


def test_constant_of_a_blend_is_the_weighted_sum():
    layer = learned(dcnet.DecoupledLinear(4, 3, operator="tanh-cos", blend=0.25))
    plain = nn.Linear(4, 3).double()
    plain.weight.data.copy_(layer.weight.data)
    decoupled = learned(dcnet.DecoupledLinear(4, 3, operator="tanh-cos"))
    expected = 0.25 * lipschitz(decoupled, [4]) + 0.75 * lipschitz(plain, [4])
    assert lipschitz(layer, [4]) == pytest.approx(expected, rel=1e-2)
    assert steepest(layer, places(layer))[0] <= lipschitz(layer, [4])
