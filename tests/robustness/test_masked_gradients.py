"""Zero gradients, the loss surface, and smoothed gradients against their formula."""

import dataclasses

import pytest
import torch
from helpers.attacked_networks import linear
from helpers.card_subjects import EFFORT
from torch import nn

import dcnet
from dcnet.robustness.masked_gradients import gradients, smoothed, surface
from dcnet.robustness.subject import Subject

OPERATORS = [
    "ball-cos",
    "tanh-cos",
    "seg-sqcos",
    "sphere-cos",
    "tanh(radius=0.5)-linear",
    "ball(radius=0.3)-cos+linear",
    "tanh-sqcos+joint",
    "ball-cos+product",
    "log-cos",
    "linear&tanh-sigmoid",
    "mix-sqcos",
    "sharp-cos",
]


def layer_of(operator: str) -> nn.Module:
    """A layer with a tracked mean norm and different constants per filter."""
    torch.manual_seed(0)
    layer = dcnet.DecoupledLinear(7, 4, operator=operator).double()
    layer(torch.randn(16, 7, dtype=torch.float64))
    with torch.no_grad():
        for name in layer.operator.learned:
            layer.get_parameter(name).mul_(torch.linspace(0.6, 1.3, layer.get_parameter(name).numel()))
    return layer.eval()


def stated(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The smoothed gradient [out, in] of one x by the formula, with the derivative of g by autograd."""
    op, rows = layer.operator, []
    w_norms, n = (layer.weight.square().sum(1) + layer.eps).sqrt(), (x.square().sum() + layer.eps).sqrt()
    mean = layer.mean_norm if op.decay is not None else 1.0
    for at, (w, w_norm) in enumerate(zip(layer.weight, w_norms, strict=True)):
        own = {k: v[at] if isinstance(v, torch.Tensor) and v.numel() > 1 else v for k, v in layer.constants().items()}
        scaled = {k: v * mean if op.slots[k].relative else v for k, v in own.items()}
        times = w_norm if op.weighting.name == "joint" else 1.0
        factor = {"linear": w_norm, "product": op.h(w_norm, own) / own.get("scale", 1.0)}.get(op.weighting.name, 1.0)
        c = (w @ x / (w_norm * n)).requires_grad_()
        g = op.g(c, scaled)
        slope = torch.autograd.grad(g, c)[0]
        rows.append(factor * gain_of(op, times, n, scaled) * slope * w / w_norm)
    return torch.stack(rows).detach()


def gain_of(op: dcnet.Operator, times: torch.Tensor, n: torch.Tensor, constants: dict) -> torch.Tensor:
    """h / n, or the slope of the linear part for magnitudes that have one."""
    total = 0.0
    for at, part in enumerate(op.magnitude.parts):
        ending = f"_{at}" if len(op.magnitude.parts) > 1 else ""
        own = {name: constants[name + ending] for name in part.slots()}
        slopes = {"ball": lambda c: c["scale"] / c["radius"], "seg": lambda c: c["scale"]}
        slopes["tanh"] = slopes["ball"]
        total += slopes[part.name](own) * times if part.name in slopes else part.value(times * n, **own) / n
    return total


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", [0.2, 30.0])
def test_smoothed_gradient_matches_the_formula(operator: str, size: float):
    layer = layer_of(operator).requires_grad_(False)
    x = size * torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with smoothed(layer):
        found = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(found, stated(layer, x))
    if size > 1:
        # The layer is saturated, so its own gradient differs.
        assert not torch.allclose(found, torch.autograd.functional.jacobian(layer, x), rtol=1e-3)


@pytest.mark.parametrize("operator", ["ball(radius=9.0)-cos", "seg(radius=9.0)-relucos", "ball(radius=9.0)-cos+linear"])
def test_smoothed_gradient_without_saturation_is_the_gradient_of_the_layer(operator: str):
    layer, x = layer_of(operator), torch.ones(7, dtype=torch.float64)
    own = torch.autograd.functional.jacobian(layer, x)
    with smoothed(layer):
        torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x), own)


@pytest.mark.parametrize("operator", [*OPERATORS, "linear-cos"])
@pytest.mark.parametrize(("kind", "padding_mode"), [("conv", "zeros"), ("conv", "reflect"), ("linear", "")])
def test_smoothed_layers_have_the_same_output(operator: str, kind: str, padding_mode: str):
    torch.manual_seed(2)
    x = torch.randn(2, 6, 5, 5)
    if kind == "conv":
        layer = dcnet.DecoupledConv2d(6, 4, 3, 2, 1, groups=2, padding_mode=padding_mode, operator=operator)
    else:
        layer = dcnet.DecoupledLinear(5, 4, operator=operator)
    layer(x)
    layer.eval()
    expected, x = layer(x), x.requires_grad_()
    with smoothed(layer):
        found = layer(x)
        found.square().sum().backward()
    assert torch.equal(found, expected)
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    # The layer is restored.
    assert "decoupled" not in layer.__dict__


def test_smoothed_gradient_of_a_convolution_matches_a_linear_layer():
    """A convolution with a window of the whole image is a linear layer, in both memory formats."""
    torch.manual_seed(3)
    rows = dcnet.DecoupledLinear(18, 4, operator="ball(radius=0.5)-cos").eval()
    layer = dcnet.DecoupledConv2d(2, 4, 3, operator="ball(radius=0.5)-cos").eval()
    layer.load_state_dict(
        {name: value.view(layer.get_parameter(name).shape) for name, value in rows.state_dict().items()}
    )
    x = torch.randn(5, 2, 3, 3)
    gradients = []
    for module, given in ((rows, x.flatten(1)), (layer, x), (layer, x.contiguous(memory_format=torch.channels_last))):
        given = given.detach().clone().requires_grad_()
        with smoothed(module):
            module(given).square().sum().backward()
        gradients.append(given.grad.reshape(5, 18))
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_smoothed_gradient_of_a_saturated_layer_points_along_the_patch():
    """A saturated layer has no gradient along the patch."""
    layer = dcnet.DecoupledLinear(7, 4, bias=False, operator="ball(radius=0.1)-cos", eps=0.0).double().eval()
    x = torch.randn(7, dtype=torch.float64)
    along = torch.autograd.functional.jacobian(layer, x) @ x
    assert along.abs().max() < 1e-12
    with smoothed(layer) as count:
        along = torch.autograd.functional.jacobian(layer, x) @ x
    assert count == 1
    # The output is c, and 10 n c where it is not saturated.
    torch.testing.assert_close(along, 10 * x.norm() * layer(x))


def test_smoothed_changes_no_layer_without_saturation():
    model = nn.Sequential(nn.Linear(7, 5), dcnet.DecoupledLinear(5, 4, operator="linear-cos")).eval()
    with smoothed(model) as count:
        assert count == 0
        assert "decoupled" not in model[1].__dict__


def test_smoothed_does_not_change_training_mode():
    layer = dcnet.DecoupledLinear(7, 4, operator="ball(radius=0.1)-cos").train()
    x = torch.randn(3, 7, requires_grad=True)
    (usual,) = torch.autograd.grad(layer(x).square().sum(), x)
    with smoothed(layer):
        (found,) = torch.autograd.grad(layer(x).square().sum(), x)
        (other,) = torch.autograd.grad(layer.eval()(x).square().sum(), x)
    assert torch.equal(found, usual)
    assert not torch.allclose(other, usual)


def test_smoothed_restores_layers_after_an_error():
    layer = dcnet.DecoupledLinear(7, 4, operator="tanh-cos").eval()
    with pytest.raises(ValueError, match="features"), smoothed(layer):
        layer(torch.randn(3, 6, requires_grad=True))
    assert "decoupled" not in layer.__dict__


def test_smoothed_changes_only_the_decoupled_part_of_a_blend():
    torch.manual_seed(5)
    options = {"bias": False, "operator": "ball(radius=0.1)-cos"}
    layer = dcnet.DecoupledLinear(7, 4, blend=0.25, **options).eval()
    whole = dcnet.DecoupledLinear(7, 4, **options).eval()
    whole.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(7)
    with smoothed(layer), smoothed(whole):
        found, decoupled = (torch.autograd.functional.jacobian(module, x) for module in (layer, whole))
    torch.testing.assert_close(found, 0.75 * layer.weight.detach() + 0.25 * decoupled)


def test_gradients_reports_the_share_of_zero_gradients():
    """The network has a zero gradient for images with a dark first pixel."""

    class Dead(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            alive = (input[:, 0, 0, 0] > 0.5).to(input.dtype)
            return torch.stack([1 + alive * input.mean((1, 2, 3)), torch.zeros(len(input))], 1)

    x = torch.rand(50, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    dead = (x[:, 0, 0, 0] <= 0.5).double().mean().item()
    given = Subject(Dead(), x, torch.zeros(50, dtype=torch.int64), effort=EFFORT, batch_size=7)
    assert gradients(given) == {"images": 50, "zero": dead, "zero_pixels": pytest.approx(dead)}
    assert 0 < dead < 1
    # Misclassified images do not count.
    wrong = (x[:, 0, 0, 0] <= 0.5).long()
    alive = gradients(dataclasses.replace(given, labels=wrong))
    assert alive == {"images": 50 - int(wrong.sum()), "zero": 0.0, "zero_pixels": 0.0}


def test_loss_surface_of_a_linear_network():
    model = linear((1.0, 2.0)).float()
    x = 0.4 + 0.2 * torch.rand(9, 3, 5, 5, generator=torch.Generator().manual_seed(2))
    y = model(x).argmax(1)
    found = surface(Subject(model, x, y, epsilon=0.1, batch_size=4))
    weight = model[1].weight
    lead = (model(x).gather(1, y[:, None]) - model(x).gather(1, 1 - y[:, None]))[:, 0]
    slope = (weight[0] - weight[1]).abs().sum()
    for amount, loss in zip(found["amounts"], found["gradient"], strict=True):
        expected = torch.nn.functional.softplus(amount * slope - lead).mean().item()
        assert loss == pytest.approx(expected, rel=1e-4)
    assert found["amounts"][-1] == pytest.approx(0.2)
    assert found["random"][8] == found["gradient"][8]
    assert found["random"][12] < found["gradient"][12]
