"""Corners of layers and of what is done with them."""

import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dcnet
from dcnet import kernels
from dcnet.equation import Processes
from dcnet.opaque import has_hooks


@pytest.mark.parametrize("magnitude", ["tanh", "ball"])
@pytest.mark.parametrize("rho", [0.002, 0.3, 1.0])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-18, 1.0])
def test_gradients_are_finite_without_eps(magnitude, rho, size):
    layer = dcnet.DecoupledConv2d(2, 3, 3, operator=f"{magnitude}(radius=Radius(init={rho}))-cos", eps=0)
    x = (size * torch.randn(1, 2, 4, 4)).requires_grad_()
    layer(x).sum().backward()
    assert layer.radius.grad.isfinite().all()
    assert x.grad.isfinite().all()


def test_a_quotient_by_radii_is_the_quotient():
    n, radius = torch.rand(4, 1, 3, 3, dtype=torch.float64) + 0.1, torch.rand(5, 1, 1, dtype=torch.float64) + 0.1
    radius.requires_grad_()
    n.requires_grad_()
    found = dcnet.magnitude._over(n, radius)
    torch.testing.assert_close(found, n / radius)
    gradients = [torch.autograd.grad(each.square().sum(), (n, radius)) for each in (found, n / radius)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = dcnet.DecoupledLinear(4, 4)

    def forward(self, x):
        return self.layer(x) + self.layer(10 * x)


def test_mean_norms_are_over_every_call():
    model, x = CalledTwice(), torch.randn(50, 4)
    dcnet.update_norms(model, [x, x])
    expected = 5.5 * (x.square().sum(1) + 1e-4).sqrt().mean()
    torch.testing.assert_close(model.layer.mean_norm, expected, rtol=1e-3, atol=0)
    assert not has_hooks(model.layer)


def test_an_empty_batch_of_data_is_told():
    with pytest.raises(TypeError, match="a batch must be a tensor or a tuple that starts with one"):
        dcnet.update_norms(CalledTwice(), [()])


def test_an_operator_in_the_place_of_the_bias():
    with pytest.raises(TypeError, match=r"bias must be True or False, not 'sphere-sqcos': an operator goes by name"):
        dcnet.DecoupledLinear(3, 4, "sphere-sqcos")


@pytest.mark.parametrize("layer", [dcnet.DecoupledConv1d(3, 4, 3), dcnet.DecoupledConv2d(3, 4, 3)])
@pytest.mark.parametrize("given", [None, [1.0], "x"])
def test_what_is_no_tensor_is_told(layer, given):
    with pytest.raises(TypeError, match="input must be a tensor, not"):
        layer(given)


@pytest.mark.parametrize("kind", [dcnet.BcosConv2d, dcnet.SharpenedCosine2d])
def test_layers_of_papers_have_their_operator(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no 'operator'"):
        kind(3, 4, 3, operator="tanh-cos")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"include": 5}, "include is a pattern"),
        ({"exclude": [nn.Conv2d]}, "exclude is a pattern"),
        ({"where": "conv"}, "where is called with the name"),
        ({"also": nn.Conv2d}, "also is a list of classes"),
    ],
)
def test_a_choice_of_layers_that_is_none(given, problem):
    with pytest.raises(TypeError, match=problem):
        dcnet.decouple(nn.Sequential(nn.Conv2d(3, 4, 3)), "tanh-cos", **given)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("tanh(radius=Radius(learnable=2))-cos", "learnable of a radius must be True or False, not 2"),
        ("tanh(scale=True)-cos", "scale of tanh must be a number, not True"),
        ("tanh(radius=Radius(init=True))-cos", "init of a radius must be a number, not True"),
        ("tanh(learnable=2)-cos", "learnable of tanh must be True or False, not 2"),
        ("tanh(scale=Learnable(per_channel=5))-cos", "per_channel of a learned constant must be True or False, not 5"),
        (f"tanh-power(p={10**400})", "p of power must be finite, not an integer of 401 digits"),
        (f"tanh(scale={10**400})-cos", "scale of tanh must be finite, not an integer of 401 digits"),
    ],
)
def test_values_of_a_wrong_type_in_a_spec(spec, problem):
    with pytest.raises(ValueError, match=problem):
        dcnet.Operator.parse(spec)


def test_a_start_is_calibrated_with_one_row():
    model = dcnet.decouple(nn.Linear(4, 3), "tanh-cos", linear=True, start="calibrated", data=[torch.randn(4)])
    assert model(torch.randn(4)).shape == (3,)


def test_a_plain_network_shares_with_nobody():
    model = dcnet.decouple(nn.Sequential(nn.Conv2d(3, 4, 3)), "tanh-cos")
    model[0].sync = Processes("a group")
    plain = dcnet.recouple(model)
    assert "sync" not in vars(plain[0])
    pickle.loads(pickle.dumps(plain))


def test_filters_that_are_computed_do_not_decay_either():
    model = nn.Sequential(weight_norm(dcnet.DecoupledLinear(4, 3, operator="tanh-cos")), weight_norm(nn.Linear(3, 2)))
    decaying, others = (group["param_names"] for group in dcnet.optim.param_groups(model, 0.1, named=True))
    assert {name for name in others if "parametrizations" in name} == {
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }
    assert "1.parametrizations.weight.original1" in decaying


@pytest.mark.parametrize("operator", ["tanh-cos", "seg(radius=Radius(relative=False))-spline", "ball&log-sqcos"])
def test_layers_need_not_be_on_the_default_device(operator):
    plain, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.device("meta"):  # stands for a GPU, where any mixture of devices would fail likewise
        layer = dcnet.decouple(plain, operator, start="calibrated", data=[x]).eval()
        folded, new = dcnet.fold(layer), dcnet.DecoupledConv2d(3, 4, 3, device="cpu", operator=operator)
        dcnet.functional.decoupled_conv2d(x, new.weight, operator=operator)
        new.reset_parameters()
        dcnet.testing.assert_decoupled(new)
    torch.testing.assert_close(folded(x), layer(x))


@pytest.mark.parametrize("eps", [-1e-3, float("nan")])
def test_functions_refuse_an_eps_that_layers_refuse(eps):
    with pytest.raises(ValueError, match="eps must not be negative, not"):
        dcnet.functional.decoupled_linear(torch.randn(2, 3), torch.randn(4, 3), operator="tanh-cos", eps=eps)


@pytest.mark.parametrize("eps", [1e-40, 1e-46, 1e-60])
@pytest.mark.parametrize("operator", ["tanh-cos", "sphere-cos", "linear-sqcos"])
def test_gradients_of_zeros_are_finite_with_an_eps_that_float32_cannot_hold(operator, eps):
    x, weight = torch.zeros(1, 3, requires_grad=True), torch.randn(4, 3)
    dcnet.functional.decoupled_linear(x, weight, operator=operator, eps=eps).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("operator", ["tanh-cos", "linear-cos", "tanh-linear+product"])
@pytest.mark.parametrize("shape", [(1,), (3,), (4, 1), ()])
def test_a_bias_that_is_not_one_number_a_filter(operator, shape):
    x, weight, bias = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.ones(shape)
    with pytest.raises(ValueError, match=re.escape(f"bias of shape {list(shape)} must have the shape [4]")):
        dcnet.functional.decoupled_conv2d(x, weight, bias, operator=operator)


@pytest.mark.parametrize("shape", [(4,), (1,), ()])
def test_the_bias_of_rows_is_spread_as_torch_does(shape):
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(shape)
    without = dcnet.functional.decoupled_linear(x, weight, operator="tanh-cos")
    found = dcnet.functional.decoupled_linear(x, weight, bias, operator="tanh-cos")
    torch.testing.assert_close(found, without + bias)


@pytest.mark.parametrize(("channels", "groups"), [(3, 3), (0, 0), (2, -2)])
def test_groups_that_do_not_part_the_filters(channels, groups):
    x, weight = torch.randn(2, channels, 5, 5), torch.randn(4, 1, 3, 3)
    with pytest.raises(ValueError, match=f"groups must part the 4 filters evenly, not {groups}"):
        dcnet.functional.decoupled_conv2d(x, weight, groups=groups, operator="tanh-cos")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"contants": {}}, "unknown option 'contants'"),
        ({"constants": {"raduis": torch.ones(4)}}, "learns no constant 'raduis'"),
        ({"eps": -1.0}, "eps must not be negative"),
    ],
)
def test_the_kernels_take_no_options_that_torch_alone_refuses(monkeypatch, options, problem):
    monkeypatch.setattr(kernels, "fits", lambda *_: True)
    with pytest.raises((TypeError, ValueError), match=problem):
        dcnet.functional.decoupled_conv2d(
            torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), operator="tanh-cos", **options
        )


@pytest.mark.parametrize("operator", ["tanh-cos", "linear-relucos+product"])
def test_a_linear_layer_without_outputs(operator):
    layer = dcnet.DecoupledLinear(3, 2, operator=operator)
    weight, bias = layer.weight[:0], layer.bias[:0]
    assert dcnet.functional.decoupled_linear(torch.randn(5, 3), weight, bias, operator=operator).shape == (5, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)  # torch's, that there is nothing to initialise
        assert dcnet.DecoupledLinear(3, 0, operator=operator)(torch.randn(5, 3)).shape == (5, 0)


def test_sizes_may_be_numbers_of_numpy():
    x, weight, two = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3), np.int64(2)
    found = dcnet.functional.decoupled_conv2d(x, weight, None, two, two, two, operator="tanh-cos")
    assert torch.equal(found, dcnet.functional.decoupled_conv2d(x, weight, None, 2, 2, 2, operator="tanh-cos"))
    assert kernels.gate._pair(two) == (2, 2)
