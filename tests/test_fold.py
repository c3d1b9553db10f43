"""A folded network gives what the network gives, and has nothing left to do that could be done beforehand."""

import copy
import io
import pickle

import pytest
import torch
from conftest import all_operators
from fold_helpers import error, norms, trained
from torch import nn

import dcnet
from dcnet import folded
from dcnet.folded import Folded, FoldedLinear
from dcnet.folding import fold
from dcnet.layers import Decoupled
from dcnet.models import create_model, networks

NETWORK_OPERATORS = [
    "conv",
    "tanh-cos",
    "seg-sqcos",
    "linear-cos",
    "sphere-linear",
    "mix(learnable=True)-sigmoid(learnable=True)",
    "ball-relucos",
    "linear-relucos+product",
]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("operator", NETWORK_OPERATORS)
@pytest.mark.parametrize("name", networks)
def test_networks_stay_what_they_are(name: str, operator: str, dtype: torch.dtype, limit: float):
    model = create_model(name, operator, width=0.1, num_classes=7)
    trained(model, 3, 32, 32, dtype=dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = fold(model)
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert error(model, small, 3, 32, 32, dtype=dtype) < limit
    assert not norms(small)
    assert not any(isinstance(module, Decoupled) for module in small.modules())
    assert not any(module.training for module in small.modules())
    assert {key for key, _ in small.named_modules()} == {key for key, _ in model.named_modules()}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("operator", all_operators())
def test_every_operator(operator: str, normalised: bool):
    layer = dcnet.DecoupledConv2d(4, 6, 3, padding=1, groups=2, operator=operator)
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(6) if normalised else nn.Identity()), 4, 5, 5)
    small = fold(model)
    assert error(model, small, 4, 5, 5) < 1e-12
    assert not norms(small)
    assert not list(small.parameters()) or operator.startswith("linear-cos")


LAYERS = [
    (dcnet.DecoupledConv1d(4, 6, 3, stride=2, padding=1, operator="tanh-cos+joint"), nn.BatchNorm1d(6), (4, 9)),
    (dcnet.DecoupledConv1d(4, 6, 3, dilation=2, operator="linear-cos"), nn.BatchNorm1d(6), (4, 9)),
    (dcnet.DecoupledConv2d(4, 6, 3, padding="same", operator="log-spline"), nn.BatchNorm2d(6), (4, 5, 5)),
    (
        dcnet.DecoupledConv2d(
            4, 6, 3, padding=1, padding_mode="circular", bias=False, operator="tanh&seg-power(p=1.5)"
        ),
        nn.BatchNorm2d(6, affine=False),
        (4, 5, 5),
    ),
    (
        dcnet.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect", operator="linear(scale=2.0)-cos+product"),
        nn.BatchNorm2d(6),
        (4, 5, 5),
    ),
    (dcnet.DecoupledConv3d(4, 6, 2, groups=2, operator="ball-sqcos"), nn.BatchNorm3d(6), (4, 3, 3, 3)),
    (dcnet.DecoupledLinear(4, 6, bias=False, operator="seg-sigmoid+product"), nn.BatchNorm1d(6), (4,)),
    (dcnet.DecoupledLinear(4, 6, operator=dcnet.Operator(torch.sqrt, torch.sin)), nn.BatchNorm1d(6), (4,)),
    (nn.Linear(4, 6), nn.BatchNorm1d(6), (4,)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_every_kind_of_layer(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]):
    model = trained(nn.Sequential(copy.deepcopy(layer), norm), *shape)
    small = fold(model)
    assert error(model, small, *shape) < 1e-12
    assert not norms(small)
    alone = trained(copy.deepcopy(layer), *shape)
    assert error(alone, fold(alone), *shape) < 1e-12


@pytest.mark.parametrize("operator", NETWORK_OPERATORS[1:])
def test_with_and_without_gradients_the_results_are_the_same(operator: str):
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 6, 3, groups=2, operator=operator), nn.BatchNorm2d(6))
    small = fold(trained(model, 4, 5, 5))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    kept, expected = x.detach().clone(), model.eval()(x)
    expected.square().sum().backward()
    gradient, x.grad = x.grad, None
    output = small(x)
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, gradient)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(small(x), output.detach())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("operator", NETWORK_OPERATORS[1:])
def test_channels_last_in_gives_channels_last_out(operator: str, groups: int):
    layer = dcnet.DecoupledConv2d(4, 6, 3, groups=groups, operator=operator)
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(6)), 4, 5, 5)
    small, x = fold(model), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    expected = model.eval()(x)
    with torch.no_grad():
        first, last = small(x), small(x.to(memory_format=torch.channels_last))
    assert first.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(last, expected)


@pytest.fixture
def network() -> nn.Module:
    return fold(trained(create_model("cnn9-small", "seg-sqcos", width=0.1, num_classes=7), 3, 32, 32))


def test_it_pickles_copies_and_saves(network: nn.Module):
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    saved = io.BytesIO()
    torch.save(network.state_dict(), saved)
    saved.seek(0)
    loaded = fold(trained(create_model("cnn9-small", "seg-sqcos", width=0.1, num_classes=7), 3, 32, 32))
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), loaded):
        assert torch.equal(other(x), network(x))


def test_it_compiles_and_exports_with_a_dynamic_batch(network: nn.Module):
    torch.compiler.reset()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), network(x))
    program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.testing.assert_close(program.module()(x[:2]), network(x[:2]))


def test_it_moves_casts_and_passes_gradients_to_the_input(network: nn.Module, device: str):
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    moved = copy.deepcopy(network).float().to(device)
    moved(x.to(device)).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    assert not any(parameter.requires_grad for parameter in moved.parameters())
    assert all(buffer.device.type == device for buffer in moved.buffers())


@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos", "linear-cos", "ball-relucos"])
def test_half_precision_stays_close(operator: str):
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 6, 3, operator=operator), nn.BatchNorm2d(6))
    trained(model, 4, 8, 8, dtype=torch.float32)
    exact, x = fold(model), torch.randn(3, 4, 8, 8)
    for small in (fold(model.bfloat16()), exact.bfloat16()):
        output = small(x.bfloat16())
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), model.float().eval()(x), rtol=0.05, atol=0.05)


def test_it_leaves_the_random_numbers_alone():
    model = trained(nn.Sequential(dcnet.conv2d(3, 4, 3, operator="linear-cos"), nn.BatchNorm2d(4)), 3, 5, 5)
    state = torch.get_rng_state()
    fold(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_layer_may_be_folded_and_shows_its_operator():
    layer = trained(dcnet.DecoupledLinear(4, 3, operator="tanh-cos"), 4)
    small = fold(layer)
    assert type(small) is FoldedLinear
    assert isinstance(small, Folded)
    assert repr(small) == "FoldedLinear([3, 4], bias=True, operator='tanh-cos')"
    with pytest.raises(ValueError, match=r"\[2, 5\] must have 4 features"):
        small(torch.randn(2, 5))


def test_what_multiplies_a_magnitude_is_found_and_not_assumed():
    for name, expected in [
        ("tanh-cos", ("scale",)),
        ("seg-sigmoid", ("scale", "slope")),
        ("mix-cos", ("scale", "log_scale")),
        ("ball&log-cos", ("scale_0", "scale_1")),
    ]:
        op = dcnet.Operator.parse(name)
        assert folded.coefficients(op, op.constants({})) == expected
    own = dcnet.Operator(torch.sqrt, "cos")
    assert folded.coefficients(own, own.constants({})) == ()
