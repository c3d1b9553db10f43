"""`assert_decoupled` accepts correct layers and rejects wrong ones."""

import pytest
import torch
from helpers.operators import operator_params

import dcnet
from dcnet.testing import assert_decoupled


@pytest.mark.parametrize("operator", operator_params())
def test_accepts_every_operator(operator):
    assert_decoupled(dcnet.DecoupledConv2d(4, 6, 3, stride=2, padding=1, groups=2, operator=operator))


def test_accepts_every_layer_without_changing_it():
    own = dcnet.Operator(lambda n: n.sqrt(), lambda c: c**3, "product")
    for layer in (
        dcnet.DecoupledConv1d(3, 3, 3, groups=3, padding=1, padding_mode="circular", operator=own),
        dcnet.DecoupledConv3d(2, 4, 2, dilation=2, padding="same"),
        dcnet.DecoupledLinear(5, 4, operator="tanh&seg-linear"),
    ):
        layer.train()
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        assert_decoupled(layer)
        assert layer.training
        assert layer.weight.dtype == torch.float32
        for name, value in layer.state_dict().items():
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+joint", "log-cos+product"])
def test_accepts_one_image_and_zero_patches_without_eps(operator):
    assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, operator=operator), torch.randn(2, 5, 6))
    assert_decoupled(dcnet.DecoupledConv1d(4, 4, 3, padding=3, groups=2, operator=operator), torch.randn(4, 7))
    assert_decoupled(dcnet.DecoupledConv2d(4, 3, 1, padding=1, operator=operator, eps=0.0))


class OffByALittle(dcnet.DecoupledConv2d):
    def forward(self, input):
        return super().forward(input) * 1.000001


class ForgetsDetach(dcnet.DecoupledConv2d):
    def forward(self, input):
        return super().forward(input.detach()) + 0 * input.sum()


def test_rejects_a_wrong_value():
    with pytest.raises(AssertionError, match=r"OffByALittle with operator 'tanh-cos' differs by .* in training"):
        assert_decoupled(OffByALittle(2, 3, 3))


def test_rejects_a_wrong_gradient():
    with pytest.raises(AssertionError, match="gradients that differ from finite differences"):
        assert_decoupled(ForgetsDetach(2, 3, 3))


def test_rejects_non_finite_values():
    steep = dcnet.Operator(lambda n: n**3, "cos")
    with pytest.raises(AssertionError, match=r"not finite if inputs are multiplied by 1e\+15"):
        assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, operator=steep))
    assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, operator=steep), factors=[0.0, 1e3])


def test_rejects_a_plain_layer():
    with pytest.raises(TypeError, match="layer must be a decoupled layer, not Conv2d"):
        assert_decoupled(torch.nn.Conv2d(3, 4, 3))


def test_accepts_frozen_parameters_and_rejects_a_blend():
    layer = dcnet.DecoupledConv2d(2, 3, 3)
    layer.radius.requires_grad_(False)
    assert_decoupled(layer)
    with pytest.raises(ValueError, match=r"with a blend is not h \* g: give a layer without one, not with 0.5"):
        assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, blend=0.5))


@pytest.fixture
def changed_classes(monkeypatch):
    """Changes classes of operators; operators parsed meanwhile are not cached for later tests."""
    monkeypatch.setattr(dcnet.operator, "_parse", dcnet.operator._parse.__wrapped__)
    return monkeypatch


def test_rejects_a_false_bound(changed_classes):
    changed_classes.setattr(dcnet.magnitude.Linear, "saturates", True)
    with pytest.raises(AssertionError, match="says it is bounded by 1 but gives"):
        assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, operator="linear-cos"))


def test_rejects_a_weighted_operator_that_claims_to_be_unweighted(changed_classes):
    changed_classes.setattr(dcnet.weighting.LinearlyWeighted, "weighted", False)
    with pytest.raises(AssertionError, match=r"does not parse back|changes when its filters are scaled"):
        assert_decoupled(dcnet.DecoupledConv2d(2, 3, 3, operator="tanh-cos+linear"))
