"""Folded networks give the results of the originals, with everything precomputed that can be."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers.folding import error, norms, trained
from helpers.operators import operator_params
from helpers.packages import timm_or_skip
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import dcnet
from dcnet.inference import folded_layers
from dcnet.inference.fold_network import fold
from dcnet.inference.folded_layers import Folded, FoldedConv, FoldedLinear
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


# The number of batch normalizations that follow pooling instead of a layer, so that they cannot be folded.
AFTER_POOLING = {"speednet": 3}


def networks_and_operators() -> list[tuple[str, str]]:
    """Every operator in one network, and every network with one operator."""
    found = [("cnn9-small", operator) for operator in NETWORK_OPERATORS] + [(name, "tanh-cos") for name in networks]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), pytest.param(torch.float32, 1e-4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "operator"), networks_and_operators())
def test_folded_networks_give_the_same_results(name: str, operator: str, dtype: torch.dtype, limit: float):
    model = create_model(name, operator, width=0.1, num_classes=7)
    trained(model, 3, 32, 32, dtype=dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = fold(model)
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert error(model, small, 3, 32, 32, dtype=dtype) < limit
    assert len(norms(small)) == AFTER_POOLING.get(name, 0)
    assert not any(isinstance(module, Decoupled) for module in small.modules())
    assert not any(module.training for module in small.modules())
    assert {key for key, _ in small.named_modules()} == {key for key, _ in model.named_modules()}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("operator", operator_params())
def test_every_operator(operator: str, normalized: bool):
    layer = dcnet.DecoupledConv2d(4, 6, 3, padding=1, groups=2, operator=operator)
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(6) if normalized else nn.Identity()), 4, 5, 5)
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


def test_folded_networks_pickle_copy_and_save(network: nn.Module):
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    saved = io.BytesIO()
    torch.save(network.state_dict(), saved)
    saved.seek(0)
    loaded = fold(trained(create_model("cnn9-small", "seg-sqcos", width=0.1, num_classes=7), 3, 32, 32))
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), loaded):
        assert torch.equal(other(x), network(x))


def test_folded_networks_compile_and_export_with_a_dynamic_batch(network: nn.Module):
    torch.compiler.reset()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), network(x))
    program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.testing.assert_close(program.module()(x[:2]), network(x[:2]))


def test_folded_networks_move_cast_and_have_input_gradients(network: nn.Module, device: str):
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


def test_folding_draws_no_random_numbers():
    model = trained(nn.Sequential(dcnet.conv2d(3, 4, 3, operator="linear-cos"), nn.BatchNorm2d(4)), 3, 5, 5)
    state = torch.get_rng_state()
    fold(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_single_layer_can_be_folded():
    layer = trained(dcnet.DecoupledLinear(4, 3, operator="tanh-cos"), 4)
    small = fold(layer)
    assert type(small) is FoldedLinear
    assert isinstance(small, Folded)
    assert repr(small) == "FoldedLinear([3, 4], bias=True, operator='tanh-cos')"
    with pytest.raises(ValueError, match=r"\[2, 5\] must have 4 features"):
        small(torch.randn(2, 5))


def test_coefficients_of_a_magnitude_are_detected():
    for name, expected in [
        ("tanh-cos", ("scale",)),
        ("seg-sigmoid", ("scale", "slope")),
        ("mix-cos", ("scale", "log_scale")),
        ("ball&log-cos", ("scale_0", "scale_1")),
    ]:
        op = dcnet.Operator.parse(name)
        assert folded_layers.coefficients(op, op.constants({})) == expected
    own = dcnet.Operator(torch.sqrt, "cos")
    assert folded_layers.coefficients(own, own.constants({})) == ()


def test_linear_cos_becomes_torchs_own_layer():
    for weighting in dcnet.weighting.registry:
        op = dcnet.Operator("linear(learnable=True)", "cos", weighting)
        model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, operator=op), nn.BatchNorm2d(4), nn.Flatten())
        small = fold(trained(model, 3, 5, 5))
        assert [type(module) for module in small] == [nn.Conv2d, nn.Identity, nn.Flatten]
    assert type(fold(dcnet.DecoupledLinear(3, 4, operator="linear-cos"))) is nn.Linear


class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
    """Records every function and the number of elements of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.seen.append((function.overloadpacket.__name__, output.numel()))
        return output

    def passes(self, elements: int) -> list[str]:
        """The functions that processed all channels, without reshapes."""
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
def test_the_fewest_passes_over_all_channels_remain(operator: str, passes: list[str]):
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 64, 3, padding=1, operator=operator), nn.BatchNorm2d(64))
    small = fold(trained(model, 4, 5, 5))
    with Shapes() as shapes, torch.no_grad():
        small(torch.randn(2, 4, 5, 5, dtype=torch.float64))
    assert shapes.passes(2 * 64 * 25) == passes


class Block(nn.Module):
    """A module with layers as attributes and a given forward."""

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
    """Calls the layers of a sequence itself, and uses the output of the convolution."""
    found, x = [], block.norm(block.conv(x))
    for part in block.pair:
        x = part(x)
        found.append(x)
    return sum(found[1:], start=found[0])


def decide(block: Block, x: Tensor) -> Tensor:
    """Cannot be traced."""
    return block.norm(block.conv(x)) if x.sum() > -1e9 else x


# The forward, and which of the normalizations norm, other and pair.1 remain; most forwards do not call other.
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
def test_only_a_normalization_that_follows_one_layer_is_folded(case: str, operator: str):
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


class Asks(nn.Module):
    """Its forward depends on the class of a submodule."""

    def __init__(self, kind: type[nn.Module], block: nn.Module) -> None:
        super().__init__()
        self.kind, self.block = kind, block

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.block:
            x = layer(x) - 0.5 if isinstance(layer, self.kind) else layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.BatchNorm2d, nn.ReLU])
def test_a_forward_that_depends_on_classes_is_not_changed(kind: type[nn.Module]):
    layers = [nn.ModuleList([dcnet.conv2d(3, 3, 3, operator="tanh-cos"), nn.BatchNorm2d(3), nn.ReLU()]) for _ in "ab"]
    model = trained(nn.Sequential(Asks(kind, layers[0]), Asks(nn.ReLU, layers[1])), 3, 7, 7)
    small = fold(model)
    assert [len(norms(small[0])), len(norms(small[1]))] == [int(kind is not nn.ReLU), 0]
    assert error(model, small, 3, 7, 7) < 1e-12


class KeepsTraining(nn.Sequential):
    """A network whose last module always stays in training mode, such as Monte Carlo dropout."""

    def train(self, mode: bool = True) -> "KeepsTraining":
        super().train(mode)
        self[-1].training = True
        return self


@pytest.mark.parametrize("last", [nn.BatchNorm2d(4), nn.Dropout(0.5), dcnet.DecoupledConv2d(4, 4, 3)])
def test_modules_that_stay_in_training_mode_stay(last: nn.Module):
    model = trained(KeepsTraining(dcnet.DecoupledConv2d(3, 4, 3), last), 3, 7, 7)
    small = fold(model)
    x = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    outputs = []
    for network in (model.eval(), small):
        torch.manual_seed(0)
        outputs.append(network(x))
    assert type(small[1]) is type(last)
    assert torch.allclose(*outputs, atol=1e-12)


def test_error_for_a_layer_that_has_seen_no_data():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(dcnet.DecoupledLinear(4, 3, operator="seg-sqcos")))
    with pytest.raises(ValueError, match=r"layer '1\.0' with operator 'seg-sqcos' has seen no data"):
        fold(model)
    model.eval()(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"run a batch in training mode first"):
        fold(model)


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
    """Normalizes only if an optional argument is given."""

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
def test_an_optional_normalization_stays(kind, folded):
    model, x, skip = kind().eval(), torch.randn(2, 3, 6, 6), torch.randn(2, 4, 4, 4)
    small = fold(model)
    assert isinstance(small.bn, nn.Identity) is folded
    torch.testing.assert_close(small(x), model(x))
    torch.testing.assert_close(small(x, skip), model(x, skip))


class Pieces(nn.Module):
    """Returns the value between a layer and its normalization, as feature extractors do."""

    def __init__(self):
        super().__init__()
        conv, bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        bn.running_mean.fill_(0.3)
        self.blocks = nn.Sequential(conv, bn, nn.ReLU())

    def forward(self, x):
        between = self.blocks[:1](x)
        return between, self.blocks[1:](between)


def test_a_normalization_after_a_slice_of_a_sequential_stays():
    model, x = Pieces().eval(), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(fold(model)(x), model(x))


class Beside(nn.Module):
    """Calls its layer, its normalization or both through a plain dict, as networks do with lists and dicts."""

    def __init__(self, *names):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.bn.running_mean.fill_(0.3)
        self.beside = {name: getattr(self, name) for name in names}

    def forward(self, x):
        return self.beside.get("bn", self.bn)(self.beside.get("conv", self.conv)(x))


@pytest.mark.parametrize("names", [["conv"], ["bn"], ["conv", "bn"]])
def test_modules_with_two_references_are_folded_in_both(names):
    model, x = Beside(*names).eval(), torch.randn(2, 3, 6, 6)
    small = fold(model)
    assert isinstance(small.bn, nn.Identity)
    torch.testing.assert_close(small(x), model(x))


class Leaves(nn.Module):
    """Stores the value between a layer and its normalization for the next call, and returns it."""

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


def test_values_that_a_forward_stores_come_from_its_own_calls():
    model, x = Leaves().eval(), torch.randn(2, 3, 6, 6)
    small = pickle.loads(pickle.dumps(fold(model)))
    assert small.half is None
    torch.testing.assert_close(small(x), model(x))
    torch.testing.assert_close(small.seen, model.seen)


class MonteCarlo(nn.Dropout):
    def forward(self, input):
        return F.dropout(input, self.p, True)


def test_dropout_that_stays_on_is_not_removed():
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
    """Reads attributes of its dropout and its normalization, as attention does for its dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = dcnet.DecoupledConv2d(3, 4, 3, operator="sphere-cos"), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = self.bn(self.conv(x)).reshape(-1, self.bn.num_features, 16)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=self.drop.p * self.training)


def test_a_forward_may_read_attributes_of_dropout_and_normalization():
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
    with pytest.raises(TypeError, match=r"model must be an nn.Module, not 5"):
        fold(5)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "lcnet_035"])
def test_norms_of_timm_are_folded_and_keep_their_activation(name: str):
    timm_or_skip()
    model = create_model(f"timm:{name}", "tanh-cos", num_classes=7)
    trained(model, 3, 32, 32)
    small = fold(model)
    assert error(model, small, 3, 32, 32) < 1e-10
    assert not norms(small)
    assert [key for key, _ in small.named_modules()] == [key for key, _ in model.named_modules()]
