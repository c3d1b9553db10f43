"""Propagation of bounds: traced forwards, and subclasses of known layers."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.gradient_attack import norms
from dcnet.robustness.certificates.certificate import certify, lipschitz


class Branches(nn.Module):
    """Two branches, joined by a given function, and a linear layer."""

    def __init__(self, join):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.inplace, self.leaky = nn.ReLU(inplace=True), nn.LeakyReLU(2.0, inplace=True)
        self.chain = nn.Sequential(nn.Identity(), nn.LeakyReLU(2.0, inplace=True))
        self.last = nn.Linear(12, 2)
        self.join = join

    def forward(self, x):
        return self.last(torch.flatten(self.join(self, x), 1))


def added_and_dropped(s, x):
    y = s.a(x)
    y.add_(s.b(x))
    return y


def two_names(s, x):
    y = s.a(x)
    z = y
    y += s.b(x)
    return y + z


def by_a_view(s, x):
    y = s.a(x)
    z = y.contiguous()
    z += s.b(x)
    return y


def by_a_module(s, x):
    return s.leaky(x) + s.a(x)


def by_modules_below(s, x):
    y = s.a(x)
    return s.chain(y) + y


def by_a_keyword(s, x):
    y = s.a(x)
    return nn.functional.relu(y, inplace=True) + y


def not_reassigned(s, x):
    y = s.a(x)
    torch.relu_(y)
    return y


STALE = {
    added_and_dropped: "'a'",
    two_names: "'a'",
    by_a_view: "'a'",
    by_a_module: "'x'",
    by_modules_below: "'a'",
    by_a_keyword: "'a'",
    not_reassigned: "'a'",
}


@pytest.mark.parametrize("join", STALE)
def test_certify_rejects_values_used_after_a_change_in_place(join):
    message = f"the Branches changes {STALE[join]} in place in its forward, and uses it afterwards: make a new value"
    with pytest.raises(ValueError, match=message) as error:
        certify(Branches(join), 0.1, image_size=2)
    assert "\n" not in str(error.value)


def changed_and_gone(s, x):
    y = s.a(x)
    y += s.b(x)
    y = s.inplace(y)
    return y.add_(x).relu_()


def changed_on_the_way(s, x):
    """As in common residual units."""
    y = s.b(s.inplace(s.a(x)))
    y += x
    return s.inplace(y)


@pytest.mark.parametrize("join", [changed_and_gone, changed_on_the_way])
def test_changes_in_place_without_later_use_are_traced(join):
    model = Branches(join).double()
    x = torch.rand(64, 3, 2, 2, dtype=torch.float64)
    for norm in ("l2", "linf"):
        certificate = certify(model, 0.1, norm, image_size=2)
        with torch.no_grad():
            moved = model(x + 0.1 * norms[norm].sample_ball(x, torch.arange(64), 0)) - model(x.clone())
        assert 0 < (moved[:, 0] - moved[:, 1]).abs().max() <= certificate.bound


def only_in_evaluation(s, x):
    y = s.a(x)
    if not s.training:
        y = y + s.b(x)
    return y


def test_certify_traces_evaluation_mode_and_restores_modes():
    model = Branches(only_in_evaluation)
    expected = certify(model.eval(), 0.1, image_size=2).bound
    model.train()
    model.b.eval()
    assert certify(model, 0.1, image_size=2).bound == expected
    assert [module.training for module in (model, model.a, model.b)] == [True, True, False]
    assert expected > certify(Branches(lambda s, x: s.a(x)), 0.1, image_size=2).bound


def test_modes_are_restored_after_an_error():
    model = Branches(two_names).train()
    with pytest.raises(ValueError, match="in place"):
        certify(model, 0.1, image_size=2)
    assert all(module.training for module in model.modules())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Flatten()

    def forward(self, x):
        return self.inner(x), x


def test_certify_rejects_a_forward_with_two_results():
    with pytest.raises(ValueError, match="has a forward that does not return one tensor"):
        certify(nn.Sequential(Pair()), 0.1, image_size=2)


def test_bounds_are_equal_in_inference_mode():
    model = nn.Sequential(nn.AvgPool2d(2), Branches(changed_on_the_way))
    with torch.inference_mode():
        found = certify(model, 0.1, image_size=4).bound
    assert found == certify(model, 0.1, image_size=4).bound


def keeping(s, x):
    s.seen = s.a(x)
    return s.seen


def test_certify_sets_no_attributes_of_the_network():
    model = Branches(keeping)
    certify(model, 0.1, image_size=2)
    assert not hasattr(model, "seen")


def test_a_layer_used_twice_counts_twice():
    layer = nn.Linear(3, 3, bias=False)
    nn.init.eye_(layer.weight)
    layer.weight.data.mul_(3)
    assert lipschitz(nn.Sequential(layer, layer), [3]) == pytest.approx(9)
    assert lipschitz(nn.Sequential(layer, nn.Identity(), layer), [3], "linf") == pytest.approx(9)


class Doubled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, 2 * weight, bias)


class DoubledPatches(dcnet.DecoupledConv2d):
    def arguments(self, input):
        return super().arguments(2 * input)


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
def test_certify_rejects_subclasses_that_compute_something_else(layer):
    with pytest.raises(ValueError, match=r"a Doubled\w*, has no rule|the Doubled\w* has no rule"):
        certify(nn.Sequential(layer, nn.Flatten()), 0.1, image_size=2)


def test_certify_rejects_a_replaced_forward():
    layer = nn.Linear(12, 2)
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)
    with pytest.raises(ValueError, match="layer '1', a Linear, has a forward other than that of its class"):
        certify(nn.Sequential(nn.Flatten(), layer), 0.1, image_size=2)


class Labelled(nn.Conv2d):
    """Overrides a method without effect on the output."""

    def extra_repr(self):
        return "labelled"


def test_subclasses_that_compute_the_same_use_the_rule_of_their_base():
    torch.manual_seed(0)
    own, plain = Labelled(3, 2, 2), nn.Conv2d(3, 2, 2)
    plain.load_state_dict(own.state_dict())
    assert lipschitz(own, [3, 4, 4]) == lipschitz(plain, [3, 4, 4])
