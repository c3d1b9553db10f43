"""Every operator compared with the paper's equations in plain loops, and its gradients with finite differences."""

import itertools

import pytest
import reference
import torch
from helpers.operators import combination_params, operator_params
from torch import Tensor

import dcnet

NAMES = [
    pytest.param(each.values, id=each.id, marks=each.marks)
    for each in combination_params(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
]
RADII = [0.7, 1.3, 2.9, 0.4]


def layer_and_input(names: tuple[str, str, str], radius: object = None) -> tuple[dcnet.DecoupledConv2d, Tensor]:
    magnitude = dcnet.magnitude.registry[names[0]]
    has_radius = "radius" in magnitude().slots()
    op = dcnet.Operator(magnitude(radius=radius) if has_radius and radius else magnitude(), names[1], names[2])
    layer = dcnet.DecoupledConv2d(3, 4, (3, 2), bias=False, operator=op, dtype=torch.float64)
    if "radius" in op.learned:
        with torch.no_grad():
            layer.radius.copy_((torch.tensor(RADII, dtype=torch.float64) - 1e-4).sqrt())
    return layer, torch.randn(2, 3, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize("names", NAMES)
def test_relative_radius_per_channel(names: tuple[str, str, str]) -> None:
    layer, x = layer_and_input(names)
    expected = reference.convolution(names, x, layer.weight.detach(), RADII, relative=True)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("names", NAMES)
def test_fixed_absolute_radius(names: tuple[str, str, str]) -> None:
    layer, x = layer_and_input(names, radius=3.5)
    expected = reference.convolution(names, x, layer.weight.detach(), [3.5] * 4)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-7, atol=1e-9)


CONSTANTS = {
    "sphere(scale=1.7)": ("sphere", {"alpha": 1.7}),
    "ball(scale=1.7,radius=2.0)": ("ball", {"alpha": 1.7}),
    "tanh(scale=1.7,radius=2.0)": ("tanh", {"alpha": 1.7}),
    "linear(scale=-1.7)": ("linear", {"alpha": -1.7}),
    "seg(scale=1.7,slope=-0.3,radius=2.0)": ("seg", {"alpha": 1.7, "beta": -0.3}),
    "log(scale=1.7)": ("log", {"alpha": 1.7}),
    "mix(scale=1.7,log_scale=0.6)": ("mix", {"alpha": 1.7, "beta": 0.6}),
    # h is negative for small norms; relucos must not absorb its sign.
    "mix(scale=1.7,log_scale=-8.0)": ("mix", {"alpha": 1.7, "beta": -8.0}),
}
ANGLES = {"sigmoid(k=0.05)": {"k": 0.05}, "power(p=3.5)": {"p": 3.5}, "cos": {}, "relucos": {}}


@pytest.mark.parametrize(
    ("magnitude", "angle", "weighting", "learnable"),
    combination_params(CONSTANTS, ANGLES, dcnet.weighting.registry, (False, True)),
)
def test_other_constants_fixed_and_learned(magnitude: str, angle: str, weighting: str, learnable: bool) -> None:
    if learnable:
        magnitude = magnitude[:-1] + ",learnable=True)"
        angle = angle[:-1] + ",learnable=True)" if "k=" in angle else angle
    name, constants = CONSTANTS[magnitude.replace(",learnable=True", "")]
    shape = ANGLES[angle.replace(",learnable=True", "")]
    op = dcnet.Operator(magnitude, angle, weighting)
    layer = dcnet.DecoupledConv2d(3, 4, (3, 2), bias=False, operator=op, dtype=torch.float64)
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    names = (name, angle.split("(")[0], weighting)
    expected = reference.convolution(names, x, layer.weight.detach(), [2.0] * 4, **constants, **shape)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weighting", dcnet.weighting.registry)
def test_sum_of_magnitudes_each_with_its_own_radius(weighting: str) -> None:
    op = dcnet.Operator("tanh(radius=2.0)&seg(radius=3.0,scale=2.0)&log", "cos", weighting)
    layer = dcnet.DecoupledLinear(6, 3, bias=False, operator=op, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    for row, (w, out) in itertools.product(range(4), zip(layer.weight.tolist(), layer(x).T.tolist(), strict=True)):
        w_norm, x_norm = ((sum(value * value for value in v) + 1e-4) ** 0.5 for v in (w, x[row].tolist()))

        def h(n: float) -> float:
            return (
                reference.magnitude("tanh", n, 2.0)
                + reference.magnitude("seg", n, 3.0, alpha=2.0)
                + reference.magnitude("log", n)
            )

        weighted = {
            "unweighted": h(x_norm),
            "linear": w_norm * h(x_norm),
            "joint": h(w_norm * x_norm),
            "product": h(w_norm) * h(x_norm),
        }[weighting]
        cos = sum(a * b for a, b in zip(w, x[row].tolist(), strict=True)) / (w_norm * x_norm)
        assert out[row] == pytest.approx(weighted * cos, rel=1e-9)


@pytest.mark.parametrize("own", ["magnitude", "angle"])
def test_custom_functions(own: str) -> None:
    x, weight = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    op = dcnet.Operator(lambda n: n.sqrt(), "cos") if own == "magnitude" else dcnet.Operator("sphere", lambda c: c**3)
    y = dcnet.functional.decoupled_conv2d(x, weight, operator=op, stride=2, padding=1)
    found = reference.patches(x, (3, 3), 2, [(1, 1)] * 2, 1, "zeros", 1)
    for (sample, _, *position), patch in found.items():
        n = (sum(value * value for value in patch) + 1e-4) ** 0.5
        for channel in range(4):
            w = weight[channel].flatten().tolist()
            w_norm = (sum(value * value for value in w) + 1e-4) ** 0.5
            cos = sum(a * b for a, b in zip(w, patch, strict=True)) / (n * w_norm)
            expected = n**0.5 * cos if own == "magnitude" else cos**3
            assert y[(sample, channel, *position)].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", operator_params())
def test_gradients(operator: str, training: bool) -> None:
    layer = dcnet.DecoupledConv2d(2, 2, 2, operator=operator, dtype=torch.float64).train(training)
    # The initial spline has a kink, since both of its sides are equally high.
    for parameter in (layer.get_parameter(name) for name in layer.operator.learned):
        parameter.data.mul_(torch.linspace(0.9, 1.2, len(parameter), dtype=torch.float64))
    assert_gradients(layer, torch.randn(1, 2, 3, 2, dtype=torch.float64))


@pytest.mark.parametrize("operator", ["ball-cos", "seg-linear", "tanh(learnable=True)-sigmoid(learnable=True)+product"])
def test_gradients_with_groups_stride_and_dilation(operator: str) -> None:
    layer = dcnet.DecoupledConv2d(4, 4, 2, 2, 1, 2, 2, operator=operator, dtype=torch.float64)
    assert_gradients(layer, torch.randn(1, 4, 5, 5, dtype=torch.float64))


def assert_gradients(layer: dcnet.DecoupledConv2d, x: Tensor) -> None:
    names = [name for name, _ in layer.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in layer.parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        return torch.func.functional_call(layer, {**dict(zip(names, values, strict=True)), **buffers}, (x,))

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *values))
    if layer.training:
        assert torch.autograd.gradgradcheck(call, (x, *values), fast_mode=True)
