"""Layers that compute something of their own, or come twice: a certificate takes none of them for another."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.robustness.certifying import certify
from dcnet.robustness.lipschitz import lipschitz


def test_a_layer_that_comes_twice_counts_twice():
    layer = nn.Linear(3, 3, bias=False)
    nn.init.eye_(layer.weight)
    layer.weight.data.mul_(3)
    assert lipschitz(nn.Sequential(layer, layer), [3]) == pytest.approx(9)
    assert lipschitz(nn.Sequential(layer, nn.Identity(), layer), [3], "linf") == pytest.approx(9)


class Doubled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, 2 * weight, bias)


class DoubledPatches(dcnet.DecoupledConv2d):
    def _convolve(self, function, input):
        return super()._convolve(function, 2 * input)


class DoubledPlain(dcnet.DecoupledConv2d):
    def plain(self, input):
        return 2 * super().plain(input)


class DoubledOperator(dcnet.DecoupledLinear):
    def decoupled(self, input):
        return 2 * super().decoupled(input)


@pytest.mark.parametrize(
    "layer",
    [
        Doubled(3, 2, 2),
        DoubledPatches(3, 2, 2),
        DoubledPlain(3, 2, 2, blend=0.5),
        nn.Sequential(nn.Flatten(), DoubledOperator(12, 2)),
    ],
    ids=["conv", "patches", "plain", "operator"],
)
def test_a_layer_that_computes_something_of_its_own_is_refused(layer):
    with pytest.raises(ValueError, match=r"a Doubled\w*, has no rule|the Doubled\w* has no rule"):
        certify(nn.Sequential(layer, nn.Flatten()), 0.1, image_size=2)


def test_a_forward_that_was_put_in_place_of_another_is_refused():
    layer = nn.Linear(12, 2)
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)
    with pytest.raises(ValueError, match="layer '1', a Linear, has a forward that is not that of its class"):
        certify(nn.Sequential(nn.Flatten(), layer), 0.1, image_size=2)


class Labelled(nn.Conv2d):
    """What does not compute may be another."""

    def extra_repr(self):
        return "labelled"


def test_a_class_that_computes_the_same_has_the_same_rule():
    torch.manual_seed(0)
    own, plain = Labelled(3, 2, 2), nn.Conv2d(3, 2, 2)
    plain.load_state_dict(own.state_dict())
    assert lipschitz(own, [3, 4, 4]) == lipschitz(plain, [3, 4, 4])
