"""What is folded and what is not, and how little is left of a layer."""

import copy

import pytest
import torch
from fold_helpers import error, norms, trained
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import dcnet
from dcnet.folded import FoldedConv
from dcnet.folding import fold


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


class Asks(nn.Module):
    """Does something else with what is of one class."""

    def __init__(self, kind: type[nn.Module], block: nn.Module) -> None:
        super().__init__()
        self.kind, self.block = kind, block

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.block:
            x = layer(x) - 0.5 if isinstance(layer, self.kind) else layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.BatchNorm2d, nn.ReLU])
def test_a_forward_that_asks_for_classes_finds_them(kind: type[nn.Module]):
    layers = [nn.ModuleList([dcnet.conv2d(3, 3, 3, operator="tanh-cos"), nn.BatchNorm2d(3), nn.ReLU()]) for _ in "ab"]
    model = trained(nn.Sequential(Asks(kind, layers[0]), Asks(nn.ReLU, layers[1])), 3, 7, 7)
    small = fold(model)
    assert [len(norms(small[0])), len(norms(small[1]))] == [int(kind is not nn.ReLU), 0]
    assert error(model, small, 3, 7, 7) < 1e-12


class KeepsTraining(nn.Sequential):
    """A network whose last module is in training mode at all times, as dropout that draws samples is."""

    def train(self, mode: bool = True) -> "KeepsTraining":
        super().train(mode)
        self[-1].training = True
        return self


@pytest.mark.parametrize("last", [nn.BatchNorm2d(4), nn.Dropout(0.5), dcnet.DecoupledConv2d(4, 4, 3)])
def test_what_is_in_training_mode_in_evaluation_stays(last: nn.Module):
    model = trained(KeepsTraining(dcnet.DecoupledConv2d(3, 4, 3), last), 3, 7, 7)
    small = fold(model)
    x = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    outputs = []
    for network in (model.eval(), small):
        torch.manual_seed(0)
        outputs.append(network(x))
    assert type(small[1]) is type(last)
    assert torch.allclose(*outputs, atol=1e-12)


def test_a_layer_without_data_is_named():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(dcnet.DecoupledLinear(4, 3, operator="seg-sqcos")))
    with pytest.raises(ValueError, match=r"layer '1\.0' with operator 'seg-sqcos' has seen no data"):
        fold(model)
    model.eval()(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"run a batch through the model in training mode first"):
        fold(model)
