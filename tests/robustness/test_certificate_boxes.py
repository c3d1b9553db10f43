"""Between which values lie behind a bounded layer and what follows it, and what is certified at the very edge."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.robustness import certifying
from dcnet.robustness.certificate import Certificate
from dcnet.robustness.lipschitz import output_bounds


def negative_norm():
    norm = nn.BatchNorm2d(2)
    nn.init.constant_(norm.weight, -2.0)
    return norm


FOLLOWING = {
    "means that count padding": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "means that do not": lambda: nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
    "the largest with padding": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "a slope that turns": lambda: nn.PReLU(2, init=-0.5),
    "one that turns all the way": lambda: nn.LeakyReLU(-1.0),
    "a small slope": lambda: nn.LeakyReLU(0.1),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "a negative scale": negative_norm,
}


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("name", FOLLOWING)
def test_the_box_of_a_bounded_layer_holds_behind_what_follows_it(name, bias):
    torch.manual_seed(0)
    layer = dcnet.DecoupledConv2d(2, 2, 1, operator="tanh-cos")
    nn.init.constant_(layer.bias, bias)
    model = nn.Sequential(layer, FOLLOWING[name]()).double().eval()
    low, high = output_bounds(model, [2, 4, 4])
    sizes = torch.logspace(-6, 3, 60, dtype=torch.float64)[:, None, None, None]
    found = model(sizes * torch.randn(60, 2, 4, 4, dtype=torch.float64)).detach().transpose(0, 1).flatten(1)
    assert (low <= found.amin(1)).all()
    assert (found.amax(1) <= high).all()
    assert high.max() - low.min() <= 13


def test_an_image_that_can_be_moved_to_the_very_edge_is_not_certified():
    """There the two logits are equal, and either may be the answer."""
    ones = torch.ones(2, 2, dtype=torch.float64)
    bounds = Certificate(0.5, "linf", ones, 4 * ones, -ones[0], ones[0])
    model = nn.Flatten()
    for lead, share in ((0.5, 0.0), (0.5 + 1e-9, 1.0)):
        x = torch.tensor([lead, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
        assert certifying._with_images(model, bounds, x, torch.tensor([0]), 1).certified == share
