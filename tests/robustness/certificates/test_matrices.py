"""Certificates with every padding mode; padding may copy pixels, so that a patch can be longer than the image."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcnet
from dcnet.gradient_attack import norms
from dcnet.robustness.certificates.certificate import certify
from dcnet.robustness.certificates.matrices import Window

MODES = ["zeros", "reflect", "replicate", "circular"]
OPERATORS = ["conv", "linear-cos", "ball(radius=4.0)-cos", "tanh-relucos", "seg-cos", "sphere-cos", "sharp-sqcos"]
SIDE = 6


def test_copied_pixels_count_once_per_copy_in_a_patch():
    conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate", bias=False)
    net = nn.Sequential(conv, nn.Flatten(), nn.Linear(16, 2)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        conv.weight[0, 0, :2, :2] = 1
        net[2].weight[0, 0] = 1
        net[2].bias[0] = -1.7
    x, epsilon = torch.full((1, 1, 4, 4), 0.5), 0.1
    certificate = certify(net, epsilon, norm="l2", x=x, y=torch.tensor([0]))
    moved = x.clone()
    moved[0, 0, 0, 0] -= epsilon
    assert float((net(moved) - net(x)).abs().max().detach()) == pytest.approx(0.4, abs=1e-5)
    assert certificate.bound == pytest.approx(0.4)
    assert certificate.certified == 0
    assert net(moved).argmax() == 1


def at_the_corner(operator: str, mode: str, padding: int, seed: int) -> nn.Module:
    """A convolution in float64, and its first output value and zero as logits."""
    torch.manual_seed(seed)
    window = {"kernel_size": 3, "padding": padding, "padding_mode": mode, "bias": False}
    conv = dcnet.layers.conv2d(2, 3, operator=operator, eps=1e-2, **window)
    side = SIDE + 2 * padding - 2
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(3 * side * side, 2)).double().eval()
    with torch.no_grad():
        conv.weight.uniform_(0.1, 1)
        nn.init.zeros_(model[2].weight)
        model[2].weight[0, 0] = 1
    return model


def deep(operator: str, mode: str, padding: int, seed: int) -> nn.Module:
    """Two convolutions with normalization, activation and pooling."""
    torch.manual_seed(seed)
    window = {"kernel_size": 3, "padding": padding, "padding_mode": mode}
    first = dcnet.layers.conv2d(2, 4, operator=operator, **window)
    second = dcnet.layers.conv2d(4, 3, operator=operator, stride=2, **window)
    layers = [first, nn.BatchNorm2d(4), nn.PReLU(4), second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model(torch.rand(8, 2, SIDE, SIDE, dtype=torch.float64))
    return model.eval()


def climb(model: nn.Module, x: Tensor, norm: str, epsilon: float, sign: int) -> Tensor:
    """Inputs within epsilon after gradient steps on the difference of the first two logits."""
    size, moved = norms[norm], x
    for _ in range(6):
        moved = moved.detach().requires_grad_()
        logits = model(moved)
        (gradient,) = torch.autograd.grad(sign * (logits[:, 0] - logits[:, 1]).sum(), moved)
        moved = x + size.project(moved.detach() + epsilon * size.steepest(gradient) - x, epsilon)
    return moved


def farthest(model: nn.Module, norm: str, epsilon: float) -> Tensor:
    """The largest movement of the difference of any two logits, by optimized and random perturbations."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(9, 2, SIDE, SIDE, dtype=torch.float64, generator=generator)
    x = noise * torch.tensor([0.0, 1e-3, 0.03, 0.1, 0.3, 0.5, 1, 1, 3], dtype=torch.float64)[:, None, None, None]
    others = [climb(model, x, norm, epsilon, sign) for sign in (1, -1)]
    others += [x + epsilon * norms[norm].sample_ball(x, torch.arange(9), seed) for seed in range(3)]
    others += [x + epsilon * norms[norm].steepest(torch.rand(x.shape, dtype=x.dtype, generator=generator))]
    with torch.no_grad():
        moved = torch.cat([model(other) - model(x) for other in others])
    return (moved[:, :, None] - moved[:, None, :]).abs().amax(0)


# In a deep network the padding is the same for every operator, so three are enough in the quick tests.
QUICK = {"conv", "tanh-relucos", "seg-cos"}
CASES = [
    pytest.param(network, operator, marks=() if network is at_the_corner or operator in QUICK else pytest.mark.slow)
    for network in (at_the_corner, deep)
    for operator in OPERATORS
]


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("network", "operator"), CASES)
def test_bounds_hold_for_every_padding_mode(network, mode, operator, norm):
    for padding, epsilon in ((1, 0.02), (1, 0.3), (2, 0.1)):
        model = network(operator, mode, padding, seed=padding)
        movement = certify(model, epsilon, norm, image_size=SIDE, channels=2).movement
        assert (farthest(model, norm, epsilon) <= movement * (1 + 1e-9)).all()


@pytest.mark.parametrize(("mode", "loose"), [("circular", 1.001), ("replicate", 1.5), ("reflect", 1.5)])
def test_bounds_are_tight_at_a_corner(mode, loose):
    """Circular padding puts no pixel into a patch twice; with other modes not all pixels have the most copies."""
    model = at_the_corner("conv", mode, 1, seed=0)
    reached = float(farthest(model, "l2", 0.1).max())
    assert certify(model, 0.1, "l2", image_size=SIDE, channels=2).bound <= loose * reached


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (3, 2)])
def test_copies_in_a_patch_match_unfold(mode, stride, dilation):
    sides, kernel, ends = (5, 7), (3, 4), (3, 2, 4, 1)
    places = torch.arange(1.0, 36.0, dtype=torch.float64).view(1, 1, *sides)
    padded = F.pad(places, ends, mode="constant" if mode == "zeros" else mode)
    patches = F.unfold(padded, kernel, dilation=dilation, stride=stride)[0].T
    held = max(int((patch[patch > 0][:, None] == patch).sum(1).max()) for patch in patches if patch.max() > 0)
    assert Window(sides, kernel, stride, dilation, ends, mode).copies_in_patch == held
