"""Chains are found in any forward, and their results are those of the modules one by one."""

import functools
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.fused_blocks import Blocks, Net, assert_same, conv, install
from helpers.packages import timm_or_skip
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

from dcnet.fuse import PLAN, fuse, fusion_report
from dcnet.layers import DecoupledConv2d


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    return install(monkeypatch)


def added(self: Any, x: Tensor) -> Tensor:
    y = self.norm(self.conv(x))
    y += x
    return F.relu(y)


def onto_residual(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y += self.norm(self.conv(x))
    return self.relu(y) + y


def control_flow(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.conv(x)) if x.sum() > 0 else x


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.norm(self.conv(x))
    return y + x


def keeps(self: Any, x: Tensor) -> Tensor:
    self.kept = self.norm(self.conv(x))
    return self.relu(self.kept)


def sets_mode(self: Any, x: Tensor) -> Tensor:
    self.training = True
    return self.norm(self.conv(x))


def without_effect(number: Any) -> Any:
    """A random number times zero, plus one."""
    return 0 * number + 1


def twice(self: Any, x: Tensor) -> Tensor:
    y = self.conv(x)
    return self.norm(y) + y


def two_in_a_row(self: Any, x: Tensor) -> Tensor:
    return self.conv2(self.in_place(self.norm(self.conv(x))))


def only_tensors(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.conv(x if isinstance(x, Tensor) else x.tensors))


# By what the forward does: the forward, and the blocks by layer.
FUSED: list[tuple[str, Callable[[Any, Tensor], Any], dict[str, str]]] = [
    ("relu", lambda m, x: m.relu(m.norm(m.conv(x))), {"conv": "conv + batch norm + ReLU"}),
    ("relu in place", lambda m, x: m.in_place(m.norm(m.conv(x))), {"conv": "conv + batch norm + ReLU"}),
    ("F.relu", lambda m, x: F.relu(m.norm(m.conv(x))), {"conv": "conv + batch norm + ReLU"}),
    ("F.relu in place", lambda m, x: F.relu(m.norm(m.conv(x)), inplace=True), {"conv": "conv + batch norm + ReLU"}),
    ("torch.relu", lambda m, x: torch.relu(m.conv(x)), {"conv": "conv + ReLU"}),
    ("tensor.relu_", lambda m, x: m.norm(m.conv(x)).relu_(), {"conv": "conv + batch norm + ReLU"}),
    ("prelu", lambda m, x: m.prelu(m.conv(x)), {"conv": "conv + PReLU"}),
    ("norm", lambda m, x: F.gelu(m.norm(m.conv(x))), {"conv": "conv + batch norm"}),
    ("F.silu", lambda m, x: F.silu(m.norm(m.conv(x))), {"conv": "conv + batch norm + SiLU"}),
    ("F.relu6 in place", lambda m, x: F.relu6(m.norm(m.conv(x)), inplace=True), {"conv": "conv + batch norm + ReLU6"}),
    ("F.hardswish", lambda m, x: F.hardswish(m.conv(x)), {"conv": "conv + Hardswish"}),
    ("silu of a sum", lambda m, x: F.silu(m.norm(m.conv(x)) + x), {"conv": "conv + batch norm + residual"}),
    ("prelu of a sum", lambda m, x: m.prelu(m.conv(x) + x), {"conv": "conv + residual"}),
    ("add", lambda m, x: m.relu(x + m.norm(m.conv(x))), {"conv": "conv + batch norm + residual + ReLU"}),
    ("add without norm", lambda m, x: x + m.conv(x), {"conv": "conv + residual"}),
    ("iadd", added, {"conv": "conv + batch norm + residual + ReLU"}),
    ("torch.add", lambda m, x: torch.add(m.norm(m.conv(x)), x), {"conv": "conv + batch norm + residual"}),
    ("tensor.add_", lambda m, x: m.norm(m.conv(x)).add_(x), {"conv": "conv + batch norm + residual"}),
    ("alpha", lambda m, x: torch.add(m.norm(m.conv(x)), x, alpha=2), {"conv": "conv + batch norm"}),
    ("number", lambda m, x: m.norm(m.conv(x)) + 1, {"conv": "conv + batch norm"}),
    ("parameter", lambda m, x: m.norm(m.conv(x)) + m.shift, {"conv": "conv + batch norm"}),
    ("buffer", lambda m, x: m.norm(m.conv(x)) * m.factor.view(1, 4, 1, 1), {"conv": "conv + batch norm"}),
    ("added to itself", lambda m, x: (lambda y: y + y)(m.norm(m.conv(x))), {"conv": "conv + batch norm"}),
    ("residual changed in place", onto_residual, {"conv": "conv + batch norm"}),
    ("residual, then PReLU", lambda m, x: m.prelu(m.norm(m.conv(x)) + x), {"conv": "conv + batch norm + residual"}),
    ("activation before residual", lambda m, x: x + m.relu(m.norm(m.conv(x))), {"conv": "conv + batch norm + ReLU"}),
    (
        "sum of two chains",
        lambda m, x: m.relu(m.norm(m.conv(x)) + m.norm2(m.conv2(x))),
        {"conv": "conv + batch norm", "conv2": "conv + batch norm + residual + ReLU"},
    ),
    (
        "squares",
        two_in_a_row,
        {"conv": "conv + batch norm + ReLU, squares to conv2", "conv2": "conv"},
    ),
    (
        "squares and residual",
        lambda m, x: (lambda y: m.relu(m.norm2(m.conv2(y)) + y))(m.relu(m.conv(x))),
        {"conv": "conv + ReLU, squares to conv2", "conv2": "conv + batch norm + residual + ReLU"},
    ),
    (
        "pooling between",
        lambda m, x: m.relu(m.conv2(F.max_pool2d(m.relu(m.conv(x)), 2))),
        {"conv": "conv + ReLU", "conv2": "conv + ReLU"},
    ),
    ("changed in place", lambda m, x: m.norm(m.conv(x)).mul_(2), {"conv": "conv + batch norm"}),
    ("sum changed in place", lambda m, x: (m.conv(x) + x).mul_(2), {"conv": "conv + residual"}),
    ("isinstance", only_tensors, {"conv": "conv + batch norm"}),
]


@pytest.mark.parametrize(("run", "found"), [case[1:] for case in FUSED], ids=[case[0] for case in FUSED])
def test_chains_in_a_forward(run: Any, found: dict[str, str], blocks: Blocks):
    model = fuse(Net(run))
    assert fusion_report(model).fused == found
    assert fusion_report(model).state == ""
    assert_same(model, blocks)
    # One forward in training, one in evaluation.
    steps = [block.partition(",")[0] for block in found.values()]
    assert sorted(call.steps for call in blocks.calls) == sorted(2 * steps)


LEFT: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: F.gelu(m.conv(x)), "gelu follows it"),
    (lambda m, x: m.conv(x), "the forward returns its output"),
    (twice, "its output is used 2 times"),
    (lambda m, x: m.relu(m.conv(m.relu(m.conv(x)))), "it is called 2 times"),
    (lambda m, x: m.norm(m.conv(m.norm(F.silu(x)))), "BatchNorm2d follows it"),
    (keeps, "the forward of Net changes the state of the module"),
    (without_gradient, "the forward of Net changes the mode of autograd or autocast"),
    (lambda m, x: checkpoint(m.norm, m.conv(x), use_reentrant=False), "cannot be traced"),
    (lambda m, x: F.dropout(m.norm(m.conv(x)), 0.0, m.training), "the forward of Net depends on the training mode"),
    (lambda m, x: m.norm(m.conv(x)) * torch.arange(4.0).view(4, 1, 1), "changes the state"),
    (lambda m, x: m.norm(m.conv(x)) if m.norm.training else m.conv(x), "depends on the training mode"),
    (lambda m, x: m.norm(m.conv(x)) if getattr(m, "training", True) else x, "depends on the training mode"),
    (sets_mode, "the forward of Net changes the state of the module"),
    (lambda m, x: m.norm(m.conv(x)) if torch.is_grad_enabled() else x, "depends on the mode of autograd or autocast"),
    (lambda m, x: x if torch.is_autocast_enabled("cpu") else m.norm(m.conv(x)), "depends on the mode of autograd or"),
    (lambda m, x: m.norm(m.conv(x)) * without_effect(random.random()), "the forward of Net draws random numbers"),
    (lambda m, x: m.norm(m.conv(x)) * without_effect(np.random.rand()), "Net draws random numbers"),
    (lambda m, x: m.norm(m.conv(x)) * without_effect(torch.rand(()).item()), "draws random numbers"),
    (lambda m, x: nn.Tanh()(m.norm(m.conv(x))), "calls a Tanh that is not one of its modules"),
    (control_flow, "the forward of Net cannot be traced: symbolically traced variables cannot be used"),
]


@pytest.mark.parametrize(("run", "reason"), LEFT, ids=[case[1][-30:] for case in LEFT])
def test_layers_that_stay(run: Any, reason: str, blocks: Blocks):
    model = fuse(Net(run))
    report = fusion_report(model)
    assert reason in report.left["conv"]
    assert report.state == "nothing to fuse"
    assert_same(model, blocks)
    assert not blocks.calls


class Custom(DecoupledConv2d):
    def decoupled(self, input: Tensor) -> Tensor:
        return 2 * super().decoupled(input)


def replaced() -> nn.Module:
    layer = conv()
    layer.forward = functools.partial(DecoupledConv2d.forward, layer)  # type: ignore[method-assign]
    return layer


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


ALONE: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Custom(4, 4, 3, padding=1), "Custom overrides methods of DecoupledConv2d"),
    (replaced, "its forward was replaced"),
    (lambda: orthogonal(conv()), "it is parametrized: its weight is computed, not stored"),
    (lambda: hooked(conv()), "it has hooks"),
    (lambda: conv(blend=0.5), "it blends with the plain layer"),
    (lambda: conv(groups=2), "groups is 2, not 1"),
    (lambda: conv(padding_mode="reflect"), "padding_mode is 'reflect', not 'zeros'"),
    (lambda: conv("linear-relucos"), "the patch norm cancels in operator 'linear-relucos'"),
    (lambda: conv("tanh&seg-cos"), "operator 'tanh&seg-cos' has no device functions"),
]


@pytest.mark.parametrize(("layer", "reason"), ALONE, ids=[case[1][:20] for case in ALONE])
def test_layers_that_blocks_cannot_compute(layer: Any, reason: str, blocks: Blocks):
    model = fuse(nn.Sequential(layer(), nn.BatchNorm2d(4), nn.ReLU()))
    assert fusion_report(model).left == {"0": reason}
    assert PLAN not in vars(model)
    assert_same(model, blocks)


AFTER: list[tuple[Callable[[], list[nn.Module]], str | None, str]] = [
    (lambda: [nn.SyncBatchNorm(4)], None, "SyncBatchNorm follows it, which averages over processes"),
    (lambda: [hooked(nn.BatchNorm2d(4))], None, "BatchNorm2d follows it, which has hooks"),
    (lambda: [nn.BatchNorm2d(4), hooked(nn.ReLU())], "conv + batch norm", ""),
    (lambda: [nn.Identity(), nn.PReLU()], "conv + PReLU", ""),
    (lambda: [nn.BatchNorm2d(4, momentum=None), nn.ReLU()], "conv + batch norm + ReLU", ""),
    (lambda: [nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU6()], "conv + batch norm + ReLU6", ""),
    (lambda: [nn.BatchNorm2d(4), nn.SiLU(inplace=True)], "conv + batch norm + SiLU", ""),
    (lambda: [nn.BatchNorm2d(4), nn.ELU(inplace=True)], "conv + batch norm", ""),
    (lambda: [nn.Hardswish()], "conv + Hardswish", ""),
    (lambda: [nn.BatchNorm2d(4, affine=False), nn.PReLU(4)], "conv + batch norm + PReLU", ""),
]


@pytest.mark.parametrize(("modules", "found", "reason"), AFTER)
def test_modules_after_a_layer(modules: Any, found: str | None, reason: str, blocks: Blocks):
    model = fuse(nn.Sequential(conv(), *modules()))
    (row,) = fusion_report(model).rows
    assert (row.fused, row.note) == (found, reason)
    if not isinstance(model[1], nn.SyncBatchNorm):
        assert_same(model, blocks)
        assert len(blocks.calls) == (0 if found is None else 2)


class Alias(nn.Module):
    """Changes a value in place that has another name, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        z = y
        y += x
        return y + z


def moved(self: Any, x: Tensor) -> Tensor:
    """Changes the input of the convolution before its output is added."""
    x = x * 2
    y = self.norm(self.conv(x))
    return self.relu(y + x.relu_())


class Doubling(nn.Module):
    """Changes its input in place, in a forward that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.sum() < 1e9 else x


def moved_by_module(self: Any, x: Tensor) -> Tensor:
    x = x * 2
    y = self.norm(self.conv(x))
    return self.relu(y + self.doubling(x))


def moved_by_aten(self: Any, x: Tensor) -> Tensor:
    x = x * 2
    y = self.norm(self.conv(x))
    return y + torch.ops.aten.mul_.Tensor(x, 2)


def outdated(self: Any, x: Tensor) -> Tensor:
    """Changes the output of a chain in place after its squares."""
    y = self.relu(self.norm(self.conv(x)))
    y.mul_(2)
    return self.relu(self.conv2(y))


def _with(model: nn.Module, **modules: nn.Module) -> nn.Module:
    for name, module in modules.items():
        model.add_module(name, module)
    return model


IN_PLACE: list[tuple[nn.Module, dict[str, str]]] = [
    (Alias(), {"conv": "conv + batch norm"}),
    (Net(moved), {"conv": "conv + batch norm"}),
    (_with(Net(moved_by_module), doubling=Doubling()), {"conv": "conv + batch norm"}),
    (Net(moved_by_aten), {"conv": "conv + batch norm"}),
    (Net(outdated), {"conv": "conv + batch norm + ReLU", "conv2": "conv + ReLU"}),
]


@pytest.mark.parametrize(
    ("model", "found"), IN_PLACE, ids=["alias", "moved", "by a module", "by torch.ops", "outdated"]
)
@torch.no_grad()
def test_changes_in_place(model: nn.Module, found: dict[str, str], blocks: Blocks):
    """Without gradients, since autograd forbids some of these changes."""
    x = torch.randn(2, 4, 6, 6)
    expected = model.eval()(x)
    torch.testing.assert_close(fuse(model)(x), expected)
    assert fusion_report(model).fused == found
    assert len(blocks.calls) == len(found)


class Stages(nn.Module):
    """Calls slices of a sequence, an item of a list, and a shared activation."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.stages = nn.Sequential(conv(), nn.BatchNorm2d(4), self.relu, conv(), nn.BatchNorm2d(4), self.relu)
        self.others = nn.ModuleList([nn.Sequential(conv(), self.relu), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        return self.others[1](self.others[0](self.stages[3:](self.stages[:3](x))))


def test_slices_lists_and_shared_activations(blocks: Blocks):
    model = fuse(Stages())
    assert fusion_report(model).fused == {
        "stages.0": "conv + batch norm + ReLU, squares to stages.3",
        "stages.3": "conv + batch norm + ReLU, squares to others.0.0",
        "others.0.0": "conv + ReLU",
    }
    assert_same(model, blocks)
    assert len(blocks.calls) == 6
    model.others[0] = nn.Identity()
    assert_same(model, blocks)


class Branch(nn.Module):
    """A forward with control flow around two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum() < 1e9 else x


def test_what_cannot_be_traced_is_called(blocks: Blocks):
    """Modules around it and inside it are fused."""
    model = fuse(nn.Sequential(conv(), nn.ReLU(), Branch(), nn.Sequential(conv(), nn.ReLU())))
    assert fusion_report(model).fused == {
        "0": "conv + ReLU",
        "2.first.0": "conv + batch norm + ReLU",
        "2.second.0": "conv + batch norm + ReLU",
        "3.0": "conv + ReLU",
    }
    assert_same(model, blocks)
    assert len(blocks.calls) == 8


def test_inner_containers_are_fused_if_outer_ones_have_no_chain(blocks: Blocks):
    """The layer is called twice in the outer container, and once in the inner one."""
    model: Any = Net(lambda m, x: m.inner(m.inner(x)))
    model.inner = nn.Sequential(conv(), nn.ReLU())
    report = fusion_report(fuse(model))
    assert report.fused == {"inner.0": "conv + ReLU"}
    assert report.left["conv"] == "no traced forward calls it"
    model(torch.randn(2, 4, 6, 6))
    assert [call.steps for call in blocks.calls] == ["conv + ReLU", "conv + ReLU"]


def with_shortcut() -> Net:
    model: Any = Net(unit)
    model.start, model.shortcut = nn.Sequential(conv(), nn.ReLU()), conv()
    return model


def unit(self: Any, x: Tensor) -> Tensor:
    x = self.start(x)
    y = self.norm2(self.conv2(self.in_place(self.norm(self.conv(x)))))
    return y + self.shortcut(x)


def test_squares_pass_the_changes_in_place_of_other_chains(blocks: Blocks):
    """The layer of the shortcut comes after an activation in place, which changes a value of its own chain only."""
    model: Any = Net(
        lambda m, x: (lambda y: m.norm2(m.conv2(m.in_place(m.norm(m.conv(y))))) + m.shortcut(y))(m.start(x))
    )
    model.start, model.shortcut = nn.Sequential(conv(), nn.ReLU()), conv()
    assert fusion_report(fuse(model)).fused == {
        "conv": "conv + batch norm + ReLU, squares to conv2",
        "conv2": "conv + batch norm",
        "start.0": "conv + ReLU, squares to conv, shortcut",
        "shortcut": "conv + residual",
    }
    assert_same(model, blocks)


@pytest.mark.parametrize(
    ("model", "count"), [(with_shortcut(), 1), (Alias(), 0), (nn.Sequential(conv(), nn.ReLU()), 0)]
)
def test_the_second_user_takes_another_result(model: Any, count: int):
    """Unless a value is changed in place, which the other result would not follow in the backward pass."""
    nodes = vars(fuse(model))[PLAN].graph.graph.nodes
    assert sum(node.target is operator.getitem and node.args[1] == 2 for node in nodes) == count


class Scaled(nn.Module):
    """A forward whose optional argument decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.inner = conv(), nn.ReLU(), nn.Sequential(conv(), nn.ReLU())

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        y = self.inner(self.relu(self.conv(x)))
        return y if scale is None else y * scale


def test_optional_arguments(blocks: Blocks):
    model, x = fuse(Scaled()), torch.randn(2, 4, 6, 6)
    report = fusion_report(model)
    assert report.left == {"conv": "the forward of Scaled has an optional argument, 'scale'"}
    assert report.fused == {"inner.0": "conv + ReLU"}
    torch.testing.assert_close(model(x, 2.0), model(x) * 2)
    assert len(blocks.calls) == 2


@pytest.mark.parametrize("after", [nn.BatchNorm2d(5), nn.PReLU(3)])
def test_other_numbers_of_channels_are_left_to_torch(after: nn.Module):
    """torch raises its own error."""
    report = fusion_report(nn.Sequential(conv(), after))
    assert report.left == {"0": f"{type(after).__name__} follows it"}


def test_layers_without_patch_norms_take_no_squares(blocks: Blocks):
    first, second, third = (nn.Sequential(conv(name), nn.ReLU()) for name in ("tanh-cos", "linear-cos", "ball-cos"))
    model = fuse(nn.Sequential(first, second, third))
    assert fusion_report(model).fused == {
        "0.0": "conv + ReLU",
        "1.0": "conv + ReLU, squares to 2.0",
        "2.0": "conv + ReLU",
    }
    assert_same(model, blocks)
    assert len(blocks.calls) == 6


NORM_ACT: list[tuple[dict[str, Any], str]] = [
    ({}, "conv + batch norm + ReLU"),
    ({"act_layer": nn.SiLU, "momentum": None}, "conv + batch norm + SiLU"),
    ({"act_layer": nn.ELU}, "conv + batch norm"),
    ({"apply_act": False}, "conv + batch norm"),
    ({"drop_layer": functools.partial(nn.Dropout, 0.0)}, "conv + batch norm"),
]


@pytest.mark.parametrize(("settings", "found"), NORM_ACT)
def test_norms_of_timm_contain_an_activation(settings: dict[str, Any], found: str, blocks: Blocks):
    norm = norm_of_timm(4, **settings)
    model = fuse(nn.Sequential(conv(), norm, nn.Conv2d(4, 4, 1), norm_of_timm(4, **settings)))
    assert fusion_report(model).fused == {"0": found}
    assert_same(model, blocks)
    assert [call.steps for call in blocks.calls] == [found] * 2
    norm.momentum = 0.5
    assert_same(model, blocks)
    assert len(blocks.calls) == 4


def norm_of_timm(channels: int, **settings: Any) -> nn.BatchNorm2d:
    made: nn.BatchNorm2d = timm_or_skip().layers.BatchNormAct2d(channels, **settings)
    return made


def test_a_residual_is_added_after_a_norm_of_timm_only_without_an_activation(blocks: Blocks):
    for settings, found in (({}, "conv + batch norm + ReLU"), ({"apply_act": False}, "conv + batch norm + residual")):
        model: Any = Net(lambda m, x: m.inner(m.conv(x)) + x)
        model.inner = norm_of_timm(4, **settings)
        assert fusion_report(fuse(model)).fused == {"conv": found}
        assert_same(model, blocks)


def test_changes_of_a_norm_of_timm_are_followed(blocks: Blocks):
    norm, x = norm_of_timm(4), torch.randn(2, 4, 6, 6)
    model = fuse(nn.Sequential(conv(), norm))
    norm.act = nn.Tanh()
    assert fusion_report(model).state == "changed since dcnet.fuse: call it again"
    assert model(x).min() < 0
    assert not blocks.calls
    hooked(norm)
    assert fusion_report(fuse(model)).left == {"0": "BatchNormAct2d follows it, which has hooks"}
    assert_same(model, blocks)
    # Next to a chain, the norm is called as a whole, so that its hook runs.
    model = fuse(nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(4, 4, 1), norm))
    assert_same(model, blocks)
    assert len(blocks.calls) == 2
