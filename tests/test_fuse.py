"""Fused networks keep their names, tensors and classes, and follow every change that is made to them."""

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from helpers.fused_blocks import SHAPE, Blocks, Net, assert_same, conv, install, results
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

import dcnet
from dcnet import kernels
from dcnet.fuse import PLAN, fuse, fusion_report, unfuse
from dcnet.inference.folded_layers import FoldedConv
from dcnet.inlining import is_fused
from dcnet.models import create_model
from dcnet.models.blocks import MarginNetwork
from dcnet.robustness.masked_gradients import smoothed
from dcnet.training.setup import Setup


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    return install(monkeypatch)


NETWORKS = {
    "resnet32": (31, "conv + batch norm + residual + ReLU", 15, 30),
    "cnn9": (9, "conv + batch norm + ReLU", 9, 6),
    "resnet18-modified": (17, "conv + batch norm + residual", 6, 15),
    "sphereface20": (20, "conv + PReLU", 20, 12),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_paper(name: str, blocks: Blocks):
    count, usual, times, handed = NETWORKS[name]
    model = fuse(create_model(name, num_classes=5, width=0.05))
    report = fusion_report(model)
    assert len(report.fused) == count
    assert not report.left
    assert sum(block.partition(",")[0] == usual for block in report.fused.values()) == times
    assert_same(model, blocks, (2, 3, 32, 32))
    assert len(blocks.calls) == 2 * count
    assert sum(call.squares for call in blocks.calls) == sum(call.hands_on for call in blocks.calls) == 2 * handed


def test_report_names_the_next_layer():
    report = fusion_report(unfuse(create_model("resnet32", width=0.05)))
    block = "conv + batch norm + residual + ReLU, squares to body.conv1.unit2.first.conv"
    assert report.fused["body.conv1.unit1.second.conv"] == block
    assert "layers in fused blocks: 31, left: 0" in str(report)
    assert str(report).rstrip().endswith("not in use yet: call dcnet.fuse")
    assert block in str(report)


def test_features_use_blocks(blocks: Blocks):
    model = fuse(create_model("cnn9", width=0.05))
    model.features(torch.randn(2, 3, 32, 32))
    assert len(blocks.calls) == 9
    with pytest.raises(ValueError, match="must be a batch of images"):
        model(torch.randn(3, 32, 32))


def test_optional_arguments_run_the_forward_of_the_class(blocks: Blocks):
    model = MarginNetwork(create_model("cnn9", num_classes=0, width=0.05), dcnet.losses.MarginSoftmax(26, 5, "arcface"))
    fuse(model)
    assert PLAN not in vars(model)
    loss, logits = model(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert loss.isfinite()
    assert logits.shape == (2, 5)
    assert len(blocks.calls) == 9


def block(*after: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), *after)


def test_names_tensors_and_classes_stay():
    model, plain = create_model("resnet32", width=0.05), create_model("resnet32", width=0.05)
    parameters = list(model.parameters())
    assert fuse(model) is model
    assert type(model) is type(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    plain.load_state_dict(model.state_dict())


def test_copies_are_fused_and_independent(blocks: Blocks):
    model, x = fuse(block(block())), torch.randn(SHAPE)
    for copied in (copy.deepcopy(model), AveragedModel(model).module):
        before = copied.eval()(x)
        assert len(blocks.calls) == 2
        blocks.calls.clear()
        with torch.no_grad():
            model[0].weight.mul_(2)
        assert torch.equal(copied(x), before)
        blocks.calls.clear()
        # The copy checks its own modules.
        copied[3][2] = nn.Tanh()
        copied(x)
        assert len(blocks.calls) == 0
        model(x)
        assert len(blocks.calls) == 2
        blocks.calls.clear()


def test_pickled_models_are_not_fused(blocks: Blocks):
    model, x = fuse(create_model("cnn9", width=0.05)), torch.randn(2, 3, 32, 32)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(x), unfuse(copy.deepcopy(model))(x))
    assert not blocks.calls
    assert not is_fused(loaded)
    assert fusion_report(loaded).state == "not in use yet: call dcnet.fuse"
    torch.testing.assert_close(fuse(loaded)(x), model(x))
    assert len(blocks.calls) == 18
    saved = io.BytesIO()
    torch.save(fuse(loaded), saved)


def test_unfuse_restores_the_forward(blocks: Blocks):
    model, x = block(block()), torch.randn(SHAPE)
    before = [set(vars(module)) for module in model.modules()]
    fuse(model)
    assert is_fused(model)
    assert is_fused(model[3])
    assert unfuse(model) is model
    assert [set(vars(module)) for module in model.modules()] == before
    assert not is_fused(model)
    model(x)
    assert not blocks.calls


def test_fusing_again_finds_what_changed(blocks: Blocks):
    model = fuse(fuse(block()))
    model(torch.randn(SHAPE))
    assert [call.steps for call in blocks.calls] == ["conv + batch norm + ReLU"]
    model[2] = nn.PReLU()
    assert fusion_report(model).state == "changed since dcnet.fuse: call it again"
    fuse(model)(torch.randn(SHAPE))
    assert [call.steps for call in blocks.calls] == ["conv + batch norm + ReLU", "conv + batch norm + PReLU"]
    assert fusion_report(model).state == ""


@pytest.mark.parametrize("function", [fuse, unfuse, fusion_report])
def test_other_objects_raise_type_error(function: Callable[[Any], Any]):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not 'model'"):
        function("model")


def test_model_with_nothing_to_fuse_stays():
    model = create_model("cnn9", "conv", width=0.05)
    before = [dict(vars(module)) for module in model.modules()]
    report = fusion_report(fuse(model))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert report.rows == ()
    assert str(report).rstrip().endswith("nothing to fuse")


def replace_forward(model: Any) -> None:
    model[3].forward = functools.partial(nn.Sequential.forward, model[3])


def change_operator(model: Any) -> None:
    dcnet.decouple(model, "tanh&seg-cos", include="0", inplace=True)


# What is changed after `fuse`, and the number of blocks that are still used, of two.
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda model: None, 2),
    "hook of the model": (lambda model: model.register_forward_hook(lambda *args: None), 2),
    "hook of a layer": (lambda model: model[0].register_forward_hook(lambda *args: None), 1),
    "hook before a norm": (lambda model: model[1].register_forward_pre_hook(lambda *args: None), 1),
    "hook of a container": (lambda model: model[3].register_forward_hook(lambda *args: args[2] * 2), 1),
    "backward hook": (lambda model: model[2].register_full_backward_hook(lambda *args: None), 1),
    "another norm": (lambda model: model.__setitem__(1, nn.GroupNorm(2, 4)), 1),
    "another module inside": (lambda model: model[3].__setitem__(2, nn.Tanh()), 0),
    "module at the end": (lambda model: model[3].append(nn.Tanh()), 0),
    "another operator": (change_operator, 1),
    "plain layers": (lambda model: dcnet.recouple(model, inplace=True), 0),
    "forward of a container": (replace_forward, 0),
    "forward of an activation": (lambda model: setattr(model[2], "forward", torch.tanh), 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_fusing_are_followed(change: str, blocks: Blocks):
    """Inner containers have their own blocks, which are used if those around them changed."""
    function, count = CHANGES[change]
    model = fuse(block(block()))
    function(model)
    blocks.fits = True
    results(model)
    assert len(blocks.calls) == 2 * count
    if "backward" not in change:
        assert_same(model, blocks)


def test_hooks_are_called_once(blocks: Blocks):
    model, seen = block(block(), block()), []
    model[3].register_forward_hook(lambda module, args, output: seen.append(module))
    fuse(model)(torch.randn(SHAPE))
    assert seen == [model[3]]
    assert len(blocks.calls) == 3
    assert fusion_report(model).fused["0"] == "conv + batch norm + ReLU"


def test_attributes_that_a_forward_reads_are_followed(blocks: Blocks):
    model: Any = Net(lambda self, x: self.norm(self.conv(x)) * (1 if self.kept is None else self.kept))
    fuse(model)(torch.randn(SHAPE))
    assert len(blocks.calls) == 1
    model.kept = 2.0
    assert_same(model, blocks)
    assert len(blocks.calls) == 1


def test_global_hooks_see_all_modules(blocks: Blocks):
    model, seen = fuse(block(block())), []
    with nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module)):
        model(torch.randn(SHAPE))
    assert set(seen) == set(model.modules())
    assert not blocks.calls


def test_sync_batch_norm_is_left_alone(blocks: Blocks):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(fuse(block()))
    assert not vars(model)[PLAN].is_intact()
    model.eval()(torch.randn(SHAPE))
    assert not blocks.calls


def test_smoothed_gradients_of_fused_models(blocks: Blocks):
    model = fuse(block()).eval()
    with smoothed(model):
        model(torch.randn(SHAPE))
    assert not blocks.calls
    model(torch.randn(SHAPE))
    assert len(blocks.calls) == 1


def test_moved_buffers_are_read_again(blocks: Blocks):
    model: Any = fuse(Net(lambda self, x: self.norm(self.conv(x)) * self.factor))
    model.double()
    model.factor = torch.full((4, 1, 1), 3.0, dtype=torch.float64)
    assert_same(model, blocks)
    assert len(blocks.calls) == 2


def test_replicas_run_the_forward_of_the_class(blocks: Blocks):
    """nn.DataParallel copies attributes, and our forward is bound to the original."""
    model = fuse(block())
    replica = model._replicate_for_data_parallel()
    assert PLAN not in vars(replica)
    assert replica.forward.__self__ is replica
    assert is_fused(model)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_fused_models(precision: str, blocks: Blocks):
    model = fuse(block())
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    prepared = accelerator.prepare(model)
    assert prepared(torch.randn(SHAPE)).dtype == torch.float32
    assert len(blocks.calls) == 1
    accelerator.unwrap_model(copy.deepcopy(model), keep_fp32_wrapper=False)(torch.randn(SHAPE))
    assert len(blocks.calls) == 2
    unfuse(model)
    assert prepared(torch.randn(SHAPE)).dtype == torch.float32
    assert len(blocks.calls) == 2


@pytest.mark.parametrize("fits", [False, True])
def test_compiled_models_use_blocks(fits: bool, monkeypatch: pytest.MonkeyPatch):
    used = []

    def compute(x: Tensor, squares: Any, layer: Any, norm: Any, activation: Any, _: Any, hands_on: bool, *_args: Any):
        used.append(squares is not None)
        output = activation(norm(layer(x)))
        return output, output.square().sum(1) if hands_on else None, output

    install(monkeypatch)
    monkeypatch.setattr(kernels, "fits_block", lambda *args: fits)
    monkeypatch.setattr(kernels, "block", compute)
    model, x = create_model("cnn9", width=0.05), torch.randn(2, 3, 32, 32)
    expected = unfuse(copy.deepcopy(model))(x)
    compiled = torch.compile(fuse(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    assert used == (3 * [False, True, True] if fits else [])


def test_processes_share_gradients_of_fused_models(blocks: Blocks):
    model = fuse(block())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.randn(SHAPE)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len(blocks.calls) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_traced_and_exported_models_have_torch_operations(blocks: Blocks, monkeypatch: pytest.MonkeyPatch):
    model, x = fuse(block(block())).eval(), torch.randn(SHAPE)
    graph = fx.symbolic_trace(model)
    assert next(node.target for node in graph.graph.nodes if node.op == "call_module") == "0"
    assert not blocks.calls
    monkeypatch.setattr(kernels, "uses_blocks", lambda x: False)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_folded_networks(blocks: Blocks):
    model, x = fuse(create_model("resnet32", width=0.05)), torch.randn(2, 3, 32, 32)
    model(x)
    small = dcnet.fold(model)
    assert is_fused(model)
    # On a machine with a GPU, `fold` fuses the folded layers.
    assert any(is_fused(module) for module in small.modules()) == torch.cuda.is_available()
    expected = unfuse(model).eval()(x)
    torch.testing.assert_close(unfuse(small)(x), expected, rtol=1e-3, atol=1e-4)
    blocks.calls.clear()
    report = fusion_report(fuse(small))
    assert isinstance(small.body.conv1.unit1.second.conv, FoldedConv)
    second = "conv + residual + ReLU, squares to body.conv1.unit2.first.conv"
    assert report.fused["body.conv1.unit1.second.conv"] == second
    torch.testing.assert_close(small(x), expected, rtol=1e-3, atol=1e-4)
    assert len(blocks.calls) == 31


def test_networks_are_fused_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    assert not is_fused(create_model("cnn9", width=0.05)) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_fused(create_model("cnn9", width=0.05))
    assert not is_fused(create_model("cnn9", "conv", width=0.05))
    with torch.device("meta"):
        assert not is_fused(create_model("cnn9", width=0.05))


@pytest.mark.parametrize(("kind", "fused"), [("NO", True), ("MULTI_GPU", True), ("FSDP", False)])
def test_training_on_a_gpu_fuses_custom_networks(kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    model: Any = block()
    model.to = lambda *args, **kwargs: model
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    config = SimpleNamespace(precision="float32")
    setup: Any = SimpleNamespace(processes=1, device=torch.device("cuda"), config=config, accelerator=accelerator)
    assert is_fused(Setup._place(setup, model)) == fused
