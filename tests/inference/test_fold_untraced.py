"""What a forward that cannot be traced reaches stays as it is, and all else is folded."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.folding import error, norms, trained
from torch import Tensor, nn

import dcnet
from dcnet.inference.fold_network import fold


def conv() -> nn.Module:
    return dcnet.conv2d(3, 3, 3, padding=1, operator="tanh-cos")


class Block(nn.Module):
    """A layer with its normalization, and a method that calls the layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = conv(), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))

    def half(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Branching(nn.Module):
    """A network whose forward cannot be traced, with a method, a property and a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv(), nn.BatchNorm2d(3), nn.ReLU(), conv(), nn.BatchNorm2d(3))
        self.block, self.blocks = Block(), nn.ModuleList([Block(), Block()])
        self.pairs = nn.ModuleList([nn.Sequential(conv(), nn.BatchNorm2d(3))])
        self.absent, self.taps = None, [self.features[0]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x if x.sum() < 1e9 else -x

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def first(self, x: Tensor) -> Tensor:
        return self.features[0](x)

    @property
    def start(self) -> nn.Module:
        return self.features[0]


def listed(net: Branching, x: Tensor) -> Tensor:
    return sum(layer(x) for layer in net.features[:2])


def inside(block: Block, x: Tensor) -> Tensor:
    return block.inner(x)


def taps(self: Branching, x: Tensor) -> Tensor:
    found = []
    for layer in self.features:
        x = layer(x)
        found.append(x)
    return torch.stack(found).sum(0)


def between(self: Branching, x: Tensor) -> Tensor:
    return self.features[1](self.features[0](x) / 2)


def unpacked(self: Branching, x: Tensor) -> Tensor:
    first, *_ = self.features
    return self.features(x) + first(x)


def attribute(self: Branching, x: Tensor) -> Tensor:
    return self.block(x) + self.block.inner(x)


def of_each(self: Branching, x: Tensor) -> Tensor:
    return sum(block(x) + block.inner(x) for block in self.blocks)


def method_of_block(self: Branching, x: Tensor) -> Tensor:
    return self.block(x) + self.block.half(x)


def own_method(self: Branching, x: Tensor) -> Tensor:
    return self.features(x) + self.first(x)


def own_property(self: Branching, x: Tensor) -> Tensor:
    return self.features(x) + self.start(x)


def own_list(self: Branching, x: Tensor) -> Tensor:
    return self.features(x) + self.taps[0](x)


def by_name(self: Branching, x: Tensor) -> Tensor:
    return self.block(x) + getattr(self.block, "in" + "ner")(x)


def all_modules(self: Branching, x: Tensor) -> Tensor:
    return self.block(x) + next(module for name, module in self.named_modules() if name == "block.inner")(x)


def function_of_network(self: Branching, x: Tensor) -> Tensor:
    return self.features(x) + listed(self, x)


def function_of_block(self: Branching, x: Tensor) -> Tensor:
    return self.block(x) + inside(self.block, x)


def whole(self: Branching, x: Tensor) -> Tensor:
    x = self.block(self.features(x))
    return self.absent(x) if self.absent is not None else x


def asked(self: Branching, x: Tensor) -> Tensor:
    return x if self.features is None or not isinstance(self, Branching) else self.features(x)


def each_whole(self: Branching, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    return self.blocks[0](x)


def each_sequence(self: Branching, x: Tensor) -> Tensor:
    for pair in self.pairs:
        x = pair(x)
    return x


FEATURES, BLOCK = {"features.1", "features.4"}, {"block.norm"}
BLOCKS, PAIRS = {"blocks.0.norm", "blocks.1.norm"}, {"pairs.0.1"}
ALL = FEATURES | BLOCK | BLOCKS | PAIRS
# The code of a network without its list of taps, and which normalizations stay.
CASES = [
    (taps, FEATURES),
    (between, FEATURES),
    (unpacked, FEATURES),
    (attribute, BLOCK),
    (of_each, BLOCKS),
    (method_of_block, BLOCK),
    (own_method, FEATURES),
    (own_property, FEATURES),
    (by_name, ALL),
    (all_modules, ALL),
    (function_of_network, FEATURES),
    (function_of_block, BLOCK),
    (whole, set()),
    (asked, set()),
    (each_whole, set()),
    # The code may also iterate over each of the sequences.
    (each_sequence, PAIRS),
]


def network(code: Callable[[Branching, Tensor], Tensor]) -> Branching:
    """A network that runs the code; its other parts are trained as well."""
    model: Branching = type("Network", (Branching,), {"run": code})()
    parts = [model.features, model.block, *model.blocks, *model.pairs]
    for part in parts:
        trained(part, 3, 6, 6)
    return model.double()


def left(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if module in norms(model)}


@pytest.mark.parametrize(("code", "stay"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_normalizations_that_the_code_may_reach_stay(code, stay):
    model = network(code)
    del model.taps
    small = fold(model)
    assert error(model, small, 3, 6, 6) < 1e-12
    assert left(small) == stay


def test_a_layer_in_a_plain_list_keeps_its_normalization():
    model = network(own_list)
    small = fold(model)
    assert error(model, small, 3, 6, 6) < 1e-12
    assert left(small) == {"features.1"}


def test_code_without_source_may_reach_everything():
    scope = {}
    exec("def run(self, x):\n    return self.features(x) + self.features[0](x)", scope)
    model = network(scope["run"])
    assert error(model, small := fold(model), 3, 6, 6) < 1e-12
    assert left(small) == ALL


def test_a_replaced_forward_may_reach_everything():
    model = network(whole)
    other = copy.deepcopy(model)
    other.forward = lambda x: Branching.forward(other, x)
    assert left(fold(other)) == ALL
    assert not left(fold(nn.DataParallel(network(whole).features)))
