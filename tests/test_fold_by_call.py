"""Folding keeps the dtype, the geometry that a forward reads, and what a forward does by default."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcnet
from dcnet import fold

OPERATORS = ["log-sqcos", "tanh-linear", "seg-sigmoid", "tanh-cos"]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half(operator, dtype):
    layers = [dcnet.DecoupledLinear(4, 4, operator=operator) for _ in range(2)]
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(8, 4).to(dtype)
    model(x)
    model.eval()
    with torch.no_grad():
        found = fold(model)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_gives_what_the_trained_layer_gives(operator):
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, operator=operator))
    x = torch.randn(2, 3, 6, 6)
    model(x)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fold(model)(x).dtype == model(x).dtype


class Optional(nn.Module):
    """Normalises only where there is something to add to."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.bn.running_mean.fill_(0.3)

    def forward(self, x, skip=None):
        y = self.conv(x)
        return y if skip is None else self.bn(y) + skip


class Always(Optional):
    def forward(self, x, skip=None):
        y = self.bn(self.conv(x))
        return y if skip is None else y + skip


@pytest.mark.parametrize(("kind", "folded"), [(Optional, False), (Always, True)])
def test_a_normalisation_that_is_not_always_there_stays(kind, folded):
    model, x, skip = kind().eval(), torch.randn(2, 3, 6, 6), torch.randn(2, 4, 4, 4)
    small = fold(model)
    assert isinstance(small.bn, nn.Identity) is folded
    torch.testing.assert_close(small(x), model(x))
    torch.testing.assert_close(small(x, skip), model(x, skip))


class Pieces(nn.Module):
    """Shows what is between a layer and its normalisation, as networks for features do."""

    def __init__(self):
        super().__init__()
        conv, bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        bn.running_mean.fill_(0.3)
        self.blocks = nn.Sequential(conv, bn, nn.ReLU())

    def forward(self, x):
        between = self.blocks[:1](x)
        return between, self.blocks[1:](between)


def test_a_normalisation_that_pieces_of_a_sequential_come_between_stays():
    model, x = Pieces().eval(), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(fold(model)(x), model(x))


class Beside(nn.Module):
    """Calls its layer, its normalisation or both by a dict beside its modules, as networks do by lists and dicts."""

    def __init__(self, *names):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.bn.running_mean.fill_(0.3)
        self.beside = {name: getattr(self, name) for name in names}

    def forward(self, x):
        return self.beside.get("bn", self.bn)(self.beside.get("conv", self.conv)(x))


@pytest.mark.parametrize("names", [["conv"], ["bn"], ["conv", "bn"]])
def test_modules_that_are_held_in_two_places_are_folded_in_both(names):
    model, x = Beside(*names).eval(), torch.randn(2, 3, 6, 6)
    small = fold(model)
    assert isinstance(small.bn, nn.Identity)
    torch.testing.assert_close(small(x), model(x))


class Leaves(nn.Module):
    """Keeps what it has made for the next call, and shows what is between a layer and its normalisation."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.bn.running_mean.fill_(0.3)
        self.half, self.seen = None, []

    def forward(self, x):
        y = self.conv(x)
        self.seen.clear()
        self.seen.append(y)
        if self.half is None:
            self.half = torch.ones_like(y) / 2
        return self.bn(y) * self.half


def test_what_a_forward_leaves_in_its_module_is_of_its_own_calls():
    model, x = Leaves().eval(), torch.randn(2, 3, 6, 6)
    small = pickle.loads(pickle.dumps(fold(model)))
    assert small.half is None
    torch.testing.assert_close(small(x), model(x))
    torch.testing.assert_close(small.seen, model.seen)


class MonteCarlo(nn.Dropout):
    def forward(self, input):
        return F.dropout(input, self.p, True)


def test_dropout_that_stays_on_stays():
    small = fold(nn.Sequential(dcnet.DecoupledLinear(4, 4, operator="linear-cos"), MonteCarlo(0.5), nn.Dropout(0.5)))
    assert isinstance(small[1], MonteCarlo)
    assert isinstance(small[2], nn.Identity)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = dcnet.DecoupledConv2d(3, 4, 3, stride=2, operator="sphere-cos")
        self.fc = dcnet.DecoupledLinear(16, 5, operator="sphere-cos")

    def forward(self, x):
        assert (self.conv.stride, self.conv.kernel_size, self.conv.out_channels) == ((2, 2), (3, 3), 4)
        return self.fc(self.conv(x).reshape(-1, self.fc.in_features))


def test_a_forward_may_read_the_geometry_of_layers():
    model, x = Reads().eval(), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fold(model)(x), model(x))


class ReadsWhatGoes(nn.Module):
    """Asks its dropout and its normalisation what they were made with, as attention does for its own dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = self.bn(self.conv(x)).reshape(-1, self.bn.num_features, 16)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=self.drop.p * self.training)


def test_a_forward_may_read_what_dropout_and_normalisation_are_made_with():
    model, x = ReadsWhatGoes().eval(), torch.randn(2, 3, 6, 6)
    small = fold(model)
    assert isinstance(small.bn, nn.Identity)
    assert not small.bn.state_dict()
    torch.testing.assert_close(small(x), model(x))


class Exponential(nn.Module):
    def forward(self, value):
        return value.exp()

    def right_inverse(self, value):
        return value.log()


def test_a_parametrized_radius_folds_and_is_reset():
    layer = dcnet.DecoupledLinear(4, 3, operator="tanh-cos")
    fresh = layer.radius.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(layer, "radius", Exponential())
    x = torch.randn(6, 4)
    layer(x)
    layer.eval()
    torch.testing.assert_close(fold(nn.Sequential(layer))(x), layer(x))
    with torch.no_grad():
        layer.parametrizations.radius.original.add_(1.0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.radius, fresh)


def test_only_networks_are_folded():
    with pytest.raises(TypeError, match="a network is folded, not 5"):
        fold(5)
