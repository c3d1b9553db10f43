"""A folded network gives what the network gives, and has nothing left to do that could be done beforehand."""

import copy
import io
import pickle

import pytest
import torch
from conftest import all_operators
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import dcnet
from dcnet import folded
from dcnet.folded import Folded, FoldedConv, FoldedLinear
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


def disturb(model: nn.Module) -> None:
    """Moves the parameters of normalisations and operators away from where they start, some below zero.

    The statistics of the last batch are those that count, so that what comes out of a deep network still depends on
    what goes in.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
        if isinstance(module, _BatchNorm) and module.affine:
            sign = torch.randint_like(module.weight, 2) * 2 - 1
            module.weight.data = sign * (0.5 + torch.rand_like(sign))
            nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, Decoupled):
            for name in module.operator.learned:
                with torch.no_grad():
                    module.get_parameter(name).mul_(1 + 0.3 * torch.rand_like(module.get_parameter(name)))


def trained(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model after a few batches, from which running means and statistics are."""
    model.to(dtype)
    disturb(model)
    for _ in range(3):
        model(torch.randn(6, *shape, dtype=dtype) + 0.2)
    return model


@torch.no_grad()
def error(model: nn.Module, other: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference of an output, as a part of the largest output."""
    batch = torch.randn(5, *shape, dtype=dtype)
    expected = model.eval()(batch)
    assert expected.std(0).max() > 1e-3 * expected.abs().max(), "the outputs must depend on the input"
    return float((other(batch) - expected).abs().max() / expected.abs().max())


def norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


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


def test_linear_cos_becomes_torchs_own_layer():
    for weighting in dcnet.weighting.registry:
        op = dcnet.Operator("linear(learnable=True)", "cos", weighting)
        model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, operator=op), nn.BatchNorm2d(4), nn.Flatten())
        small = fold(trained(model, 3, 5, 5))
        assert [type(module) for module in small] == [nn.Conv2d, nn.Identity, nn.Flatten]
    assert type(fold(dcnet.DecoupledLinear(3, 4, operator="linear-cos"))) is nn.Linear


class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every function, and how many elements it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.seen.append((function.overloadpacket.__name__, output.numel()))
        return output

    def passes(self, elements: int) -> list[str]:
        """The functions that ran over all channels, reshaping aside."""
        idle = ("view", "unsqueeze", "_unsafe_view", "detach", "alias", "t")
        return [name for name, count in self.seen if count >= elements and name not in idle]


@pytest.mark.parametrize(
    ("operator", "passes"),
    [
        ("linear-cos", ["convolution"]),
        ("linear-relucos", ["convolution", "relu", "mul_", "add_"]),
        ("sphere-cos", ["convolution", "mul_", "add_"]),
        ("tanh(radius=2.0)-cos", ["convolution", "mul_", "add_"]),
        ("tanh-cos", ["convolution", "div", "tanh", "mul", "mul_", "add_"]),
        ("tanh-sqcos", ["convolution", "mul_", "abs", "mul", "div", "tanh", "mul", "mul_", "add_"]),
    ],
)
def test_the_least_passes_over_all_channels_remain(operator: str, passes: list[str]):
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 64, 3, padding=1, operator=operator), nn.BatchNorm2d(64))
    small = fold(trained(model, 4, 5, 5))
    with Shapes() as shapes, torch.no_grad():
        small(torch.randn(2, 4, 5, 5, dtype=torch.float64))
    assert shapes.passes(2 * 64 * 25) == passes


class Block(nn.Module):
    """Layers as attributes, as most networks have them; what is done with them is given."""

    def __init__(self, forward, operator: str = "tanh-cos", norm: nn.Module | None = None):
        super().__init__()
        self.conv = dcnet.conv2d(3, 3, 3, padding=1, operator=operator)
        self.norm, self.other = norm or nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.dropout = nn.Dropout()
        self.pair = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.dropout(self.run(self, x)))


def walk(block: Block, x: Tensor) -> Tensor:
    """Looks into the sequence, and at what the convolution in it gives."""
    found, x = [], block.norm(block.conv(x))
    for part in block.pair:
        x = part(x)
        found.append(x)
    return sum(found[1:], start=found[0])


def decide(block: Block, x: Tensor) -> Tensor:
    """Cannot be traced."""
    return block.norm(block.conv(x)) if x.sum() > -1e9 else x


# What is called, and which of the normalisations norm, other and pair.1 are left; other is not called in most of them.
FORWARDS = {
    "pair": (lambda block, x: block.norm(block.conv(x)), {"other"}),
    "between": (lambda block, x: block.norm(block.conv(x).relu()), {"norm", "other"}),
    "used_twice": (lambda block, x: block.norm(y := block.conv(x)) + y, {"norm", "other"}),
    "two_norms": (lambda block, x: block.norm(y := block.conv(x)) + block.other(y), {"norm", "other"}),
    "called_twice": (lambda block, x: block.norm(block.conv(block.conv(x))), {"norm", "other"}),
    "norm_called_twice": (lambda block, x: block.norm(block.norm(block.conv(x))), {"norm", "other"}),
    "weight_read": (lambda block, x: block.norm(block.conv(x)) + block.conv.weight.sum(), {"norm", "other"}),
    "looked_into": (walk, {"other", "pair.1"}),
    "untraceable": (decide, {"norm", "other"}),
    "keywords": (lambda block, x: block.norm(input=block.conv(input=x)), {"norm", "other"}),
}


@pytest.mark.parametrize("operator", ["tanh-cos", "conv"])
@pytest.mark.parametrize("case", FORWARDS)
def test_only_what_sees_a_layer_alone_is_folded(case: str, operator: str):
    forward, left = FORWARDS[case]
    model = trained(nn.Sequential(Block(forward, operator), nn.Conv2d(3, 2, 1)), 3, 6, 6)
    small = fold(model)
    assert {name.removeprefix("0.") for name, part in small.named_modules() if isinstance(part, _BatchNorm)} == left
    assert error(model, small, 3, 6, 6) < 1e-12
    assert type(small[0].dropout) is nn.Identity


def test_a_layer_of_two_parents_and_a_norm_without_statistics_are_not_folded():
    shared = dcnet.conv2d(3, 3, 3, padding=1, operator="tanh-cos")
    two = nn.Sequential(nn.Sequential(shared, nn.BatchNorm2d(3)), nn.Sequential(shared, nn.BatchNorm2d(3)))
    small = fold(trained(two, 3, 5, 5))
    assert len(norms(small)) == 2
    assert small[0][0] is small[1][0]
    assert error(two, small, 3, 5, 5) < 1e-12
    unknown = nn.Sequential(copy.deepcopy(shared), nn.BatchNorm2d(3, track_running_stats=False))
    small = fold(trained(unknown, 3, 5, 5))
    assert len(norms(small)) == 1
    assert error(unknown, small, 3, 5, 5) < 1e-12


def test_a_block_that_is_used_twice_is_folded_once():
    block = nn.Sequential(dcnet.conv2d(3, 3, 3, padding=1, operator="tanh-cos"), nn.BatchNorm2d(3))
    model = trained(nn.Sequential(block, nn.ReLU(), block), 3, 5, 5)
    small = fold(model)
    assert small[0] is small[2]
    assert not norms(small)
    assert error(model, small, 3, 5, 5) < 1e-12


class Doubled(dcnet.DecoupledConv2d):
    def decoupled(self, input: Tensor) -> Tensor:
        return 2 * super().decoupled(input)


def test_layers_that_compute_something_else_stay():
    hooked = dcnet.conv2d(3, 3, 3, operator="tanh-cos")
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    blended = dcnet.DecoupledConv2d(3, 3, 3, operator="tanh-cos", blend=0.5)
    for layer in (hooked, blended, Doubled(3, 3, 3)):
        model = trained(nn.Sequential(layer, nn.BatchNorm2d(3)), 3, 5, 5)
        small = fold(model)
        assert type(small[0]) is type(layer)
        assert len(norms(small)) == 1
        assert error(model, small, 3, 5, 5) == 0
    done = dcnet.DecoupledConv2d(3, 3, 3, operator="tanh-cos", blend=1.0)
    assert type(fold(trained(done, 3, 5, 5))) is FoldedConv


def test_a_layer_without_data_is_named():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(dcnet.DecoupledLinear(4, 3, operator="seg-sqcos")))
    with pytest.raises(ValueError, match=r"layer '1\.0' with operator 'seg-sqcos' has seen no data"):
        fold(model)
    model.eval()(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"run a batch through the model in training mode first"):
        fold(model)


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
