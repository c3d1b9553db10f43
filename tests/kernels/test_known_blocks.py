"""Blocks that ran before: found again only if nothing has changed, with the same results."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.address_launches import runs_by_address
from helpers.kernel_comparison import ON_GPU, images, quiet_numpy
from torch import nn
from torch.nn.utils import parametrize

import dcnet
from dcnet import kernels
from dcnet.kernels import fused_block, known_blocks, use_kernels

pytestmark = [quiet_numpy, pytest.mark.skipif(ON_GPU, reason="pretends that tensors of the CPU are on a GPU")]

SHAPE = (2, 4, 5, 6)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(known_blocks, "_known", {})
    monkeypatch.setattr(fused_block, "_compiled", {})


class Modules(nn.Module):
    """The modules and the inputs of a block."""

    def __init__(self, operator="tanh-cos"):
        super().__init__()
        torch.manual_seed(0)
        self.layer = dcnet.DecoupledConv2d(4, 4, 3, padding=1, bias=False, operator=operator)
        self.norm, self.activation = nn.BatchNorm2d(4), nn.PReLU(4)
        self.x, self.squares, self.residual, self.hands_on = images(*SHAPE), None, None, True

    def given(self):
        return self.x, self.squares, self.layer, self.norm, self.activation, self.residual

    def known(self):
        return kernels.find_known_block(*self.given(), self.hands_on)

    def run(self):
        return kernels.block(*self.given(), self.hands_on, self.known())


def a_known_block():
    """A block that ran before."""
    block = Modules()
    assert block.known() is None
    block.run()
    assert block.known() is not None
    return block


def set_to(part=None, **values):
    def change(block):
        for name, value in values.items():
            setattr(block if part is None else getattr(block, part), name, value)

    return change


CHANGES = {
    "operator": lambda block: setattr(block.layer, "operator", dcnet.Operator.parse("ball-cos")),
    "dtype of the filters": lambda block: block.layer.to(torch.bfloat16),
    "stride": set_to("layer", stride=(2, 2)),
    "eps of the layer": set_to("layer", eps=1e-2),
    "evaluation": lambda block: block.eval(),
    "frozen norm": lambda block: block.norm.eval(),
    "no norm": set_to(norm=None),
    "eps of the norm": set_to("norm", eps=1e-2),
    "momentum": set_to("norm", momentum=0.3),
    "cumulative average": set_to("norm", momentum=None),
    "statistics are not tracked": set_to("norm", track_running_stats=False),
    "no statistics": set_to("norm", running_mean=None, running_var=None),
    "not affine": set_to("norm", weight=None, bias=None),
    "channels of the norm": set_to("norm", num_features=5),
    "dtype of the norm": lambda block: block.norm.to(torch.bfloat16),
    "no count": set_to("norm", num_batches_tracked=None),
    "activation": set_to(activation=nn.ReLU()),
    "no activation": set_to(activation=None),
    "one slope": set_to(activation=nn.PReLU()),
    "residual": set_to(residual=images(*SHAPE)),
    "squares": set_to(squares=torch.ones(2, 5, 6)),
    "squares are not returned": set_to(hands_on=False),
    "size of the input": set_to(x=images(1, *SHAPE[1:])),
    "layout of the input": set_to(x=images(*SHAPE).to(memory_format=torch.channels_last)),
    "dtype of the input": set_to(x=images(*SHAPE).half()),
    "parametrized norm": lambda block: parametrize.register_parametrization(block.norm, "weight", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_block_is_not_known(change):
    block = a_known_block()
    change(block)
    assert block.known() is None


def test_block_with_a_window_of_lists_is_never_known():
    block = a_known_block()
    block.layer.stride = [1, 1]
    for _ in range(2):
        assert block.known() is None
        block.run()


def test_block_is_not_known_in_other_modes(monkeypatch):
    block = a_known_block()
    for mode in (lambda: use_kernels(False), forward_ad.dual_level):
        with mode():
            assert block.known() is None
    monkeypatch.setattr("torch.is_autocast_enabled", lambda device: True)
    assert block.known() is None


def test_registry_that_changed_needs_new_checks():
    block = a_known_block()
    dcnet.magnitude.registry["tanh"] = dcnet.magnitude.registry["tanh"]
    assert block.known() is None


def results(block):
    """Output, squares and all gradients of a block, and its buffers after the call."""
    block.x.requires_grad_()
    block.zero_grad()
    output, squares, _ = block.run()
    cotangent, inputs = torch.linspace(-1, 2, 240).view(SHAPE), [block.x, *block.parameters()]
    gradients = torch.autograd.grad([output, squares], inputs, [cotangent, torch.ones_like(squares)])
    return [output, squares, *gradients, *[buffer.clone() for buffer in block.buffers()]]


def with_residual(block):
    block.residual, block.activation = images(*SHAPE), nn.ReLU()


@pytest.mark.parametrize("change", [nn.Module.train, nn.Module.eval, with_residual])
@pytest.mark.parametrize("operator", ["tanh-cos", "linear-cos", "seg-sqcos"])
def test_known_block_gives_the_same_results(operator, change):
    block = Modules(operator)
    change(block)
    again = copy.deepcopy(block)
    again.layer.operator = block.layer.operator
    wanted = results(block)
    assert again.known() is not None
    found = results(again)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_known_block_uses_the_current_values():
    block = a_known_block()
    with torch.no_grad():
        for value in (*block.parameters(), block.x):
            value.mul_(1.5)
    copied = copy.deepcopy(block)
    assert copied.known() is None
    assert torch.equal(block.run()[0], copied.run()[0])


def test_known_block_reads_the_mode_of_autograd():
    block = a_known_block()
    with torch.no_grad():
        assert not block.run()[0].requires_grad
    assert block.run()[0].requires_grad
    assert not block.requires_grad_(False).run()[0].requires_grad


def test_known_blocks_keep_their_operator():
    block = a_known_block()
    assert block.known()[0].operator is block.layer.operator


def test_number_of_known_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(known_blocks, "MOST_COMPILED", 2)
    block = Modules()
    for count in range(1, 5):
        block.x = images(count, *SHAPE[1:])
        block.run()
    assert len(known_blocks._known) == 2


def test_launches_with_addresses_give_the_same_results(monkeypatch):
    first = Modules()
    second = copy.deepcopy(first)
    second.layer.operator = first.layer.operator
    with runs_by_address(monkeypatch) as taken:
        wanted = results(first)
        launches = len(taken)
        found = results(second)
    assert taken[:launches] == ["with tensors"] * launches
    assert taken.count("with addresses") == launches
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
