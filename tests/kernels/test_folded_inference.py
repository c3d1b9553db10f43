"""Folded layers in the kernels, compared with the trained network with batch normalization."""

import pytest
import torch
from helpers.kernel_comparison import DEVICE, alternating, assert_close, quiet_numpy
from helpers.operators import all_operators, pairwise_operators
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dcnet
from dcnet import kernels
from dcnet.eager import ConvPatches
from dcnet.inference.folded_layers import FoldedConv
from dcnet.kernels import dispatch, folded_inference
from dcnet.kernels.plan import has_device_functions


def covered():
    operators = [dcnet.Operator.parse(spec) for spec in all_operators()]
    return [str(op) for op in operators if has_device_functions(op) and not op.norm_cancels]


def covered_params():
    """Every operator with both settings; all are slow, except pairwise operators with one setting each."""
    quick = [name for name in covered() if name in pairwise_operators()]
    others = [name for name in covered() if name not in quick]
    settings = [(True, 1, True), (False, 2, False)]
    slow = [pytest.param(name, *setting, marks=pytest.mark.slow) for name in others for setting in settings]
    return [*alternating(quick, settings), *slow]


def trained(operator, bias, groups, last, **window):
    """A layer and a batch normalization after two batches, in evaluation mode, with factors of both signs."""
    window = {"kernel_size": 3, "stride": 2, "padding": 1, **window}
    conv = dcnet.DecoupledConv2d(6, 8, groups=groups, bias=bias, operator=operator, **window)
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(conv, norm).to(DEVICE)
    for _ in range(2):
        model(torch.randn(4, 6, 7, 5, device=DEVICE))
    with torch.no_grad():
        norm.weight.mul_(torch.randn(8, device=DEVICE))
        norm.bias.add_(torch.randn(8, device=DEVICE))
    return model.eval().to(memory_format=torch.channels_last if last else torch.contiguous_format)


def fold_layer(model):
    """The folded layer of a network that has one."""
    (layer,) = [module for module in dcnet.fold(model).modules() if isinstance(module, FoldedConv)]
    return layer


def folded_layer(operator, bias, groups, last):
    return fold_layer(trained(operator, bias, groups, last))


def by_kernels(layer, x):
    return dispatch.folded(x, layer.weight, layer.bias, layer.table(), layer.operator, layer.eps, layer.window)


@pytest.mark.parametrize(("operator", "bias", "groups", "last"), covered_params())
def test_folded_layer_in_kernels_matches_the_trained_layer(operator, bias, groups, last):
    model = trained(operator, bias, groups, last)
    layer = fold_layer(model)
    x = torch.randn(3, 6, 7, 5, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    with torch.no_grad():
        expected, found = model.double()(x.double()), by_kernels(layer, x)
    assert (found - expected).norm() <= 2e-5 * expected.norm()


def test_folded_layer_of_rows():
    """Its norms take two launches: the filters are prepared already."""
    model = trained("tanh-sqcos", bias=True, groups=1, last=True, kernel_size=1, stride=1, padding=0)
    x = torch.randn(2, 6, 25, 26, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found, expected = by_kernels(fold_layer(model), x), model.double()(x.double())
    assert (found - expected).norm() <= 2e-5 * expected.norm()


def test_table_is_rebuilt_if_a_buffer_changes():
    layer = folded_layer("tanh-sqcos", bias=False, groups=1, last=True)
    x, before = torch.randn(1, 6, 7, 5, device=DEVICE), layer.table()
    assert layer.table() is before
    with torch.no_grad():
        output = by_kernels(layer, x) - layer.bias.view(-1, 1, 1)
        layer.factor.mul_(3)
        tripled = by_kernels(layer, x) - layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(tripled, 3 * output, rtol=1e-4, atol=1e-5)


def test_gradients_and_the_cpu_fall_back_to_torch():
    layer = folded_layer("tanh-cos", bias=False, groups=1, last=True)
    x = torch.randn(1, 6, 7, 5, device=DEVICE)
    arguments = (layer.weight, layer.bias, layer.operator, layer.window[1], 1)
    assert dispatch.fits_folded(x, *arguments) == (DEVICE == "cuda")
    assert not dispatch.fits_folded(x.requires_grad_(), *arguments)
    with torch.no_grad():
        assert dispatch.fits_folded(x, *arguments) == (DEVICE == "cuda")


def test_layer_folded_in_inference_mode():
    """Its buffers have no version counter to cache the table by."""
    model = trained("tanh-sqcos", bias=False, groups=1, last=True)
    with torch.inference_mode():
        layer = fold_layer(model)
        x = torch.randn(1, 6, 7, 5, device=DEVICE)
        torch.testing.assert_close(by_kernels(layer, x), model(x), rtol=1e-4, atol=1e-5)
        before = layer.table()
        layer.factor.mul_(3)
        assert not torch.equal(layer.table(), before)


# --- compiled ---


def compiled(function, backend):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    ("operator", "backend"),
    alternating(["tanh-cos", "seg(learnable=True)-sigmoid+product", "log-linear+joint"], [("aot_eager",), ("eager",)]),
)
def test_compiled_layer_gives_the_same_and_sees_changed_buffers(operator, backend):
    run = compiled(by_kernels, backend)
    for bias, groups, last in ((True, 1, True), (False, 2, False)):
        layer, x = folded_layer(operator, bias, groups, last), torch.randn(3, 6, 7, 5, device=DEVICE)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(run(layer, x), by_kernels(layer, x))
                layer.factor.mul_(3)
                layer.w_norm.mul_(1.5)


def test_compiled_layer_accepts_images_of_any_size():
    layer = folded_layer("tanh-cos", bias=False, groups=1, last=False)
    torch.compiler.reset()
    run = torch.compile(by_kernels, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((3, 6, 7, 5), (2, 6, 4, 9), (1, 6, 2, 2)):
        x = torch.randn(size, device=DEVICE)
        with torch.no_grad():
            assert torch.equal(run(layer, x), by_kernels(layer, x))


class OnGpu(nn.Module):
    """A folded layer on a GPU that is not installed; its forward is only traced."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        there = {name: torch.empty(buffer.shape, device="cuda") for name, buffer in self.layer.named_buffers()}
        return torch.func.functional_call(self.layer, there, (torch.empty(3, 6, 7, 5, device="cuda"),))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    return OnGpu(folded_layer("tanh-cos", bias=True, groups=1, last=False))


def calls_when_compiled(network):
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *given: (torch.zeros(()),)

    compiled(network, keep)()
    (calls,) = graphs
    return calls


def test_compiled_on_a_gpu_is_one_operation(on_gpu):
    assert [name for name in calls_when_compiled(on_gpu) if "conv2d" in name] == ["dcnet.folded_conv2d.default"]


def test_compiled_on_a_gpu_without_kernels_uses_torch(on_gpu):
    with dispatch.use_kernels(False):
        assert not any("dcnet" in name for name in calls_when_compiled(on_gpu))


def test_compiled_layers_with_gradients_or_autocast_fall_back_to_torch(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    with FakeTensorMode():
        x, w = torch.empty(3, 6, 7, 5, device="cuda"), torch.empty(8, 6, 3, 3, device="cuda")
    arguments = (w, None, dcnet.Operator.parse("tanh-cos"), 0, 1)
    assert dispatch.fits_folded(x, *arguments)
    assert not dispatch.fits_folded(x, w.detach().requires_grad_(), *arguments[1:])
    assert not dispatch.fits_folded(x.requires_grad_(), *arguments)
    with torch.no_grad():
        assert dispatch.fits_folded(x, *arguments)
        monkeypatch.setattr("torch.is_autocast_enabled", lambda device: True)
        assert not dispatch.fits_folded(x, *arguments)


def test_export_on_a_gpu_uses_torch(on_gpu):
    program = torch.export.export(on_gpu, ())
    names = [str(node.target) for node in program.graph.nodes]
    assert any("conv2d" in name for name in names)
    assert not any("dcnet" in name for name in names)


@quiet_numpy
@pytest.mark.parametrize(("bias", "groups", "last"), [(True, 1, True), (False, 2, False)])
def test_operation_passes_opcheck(bias, groups, last):
    layer = folded_layer("tanh-sqcos+joint", bias, groups, last)
    window = ((2, 1), (1, 0), (1, 2), groups)
    for size in ((3, 6, 7, 5), (1, 6, 2, 5), (2, 6, 1, 5)):
        x = torch.randn(size, device=DEVICE)
        given = (x, layer.weight, layer.bias, layer.table(), str(layer.operator), layer.eps, *window)
        torch.library.opcheck(torch.ops.dcnet.folded_conv2d.default, given)
        fake = FakeTensorMode()
        fakes = [fake.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in given]
        found, promised = (torch.ops.dcnet.folded_conv2d.default(*arguments) for arguments in (given, fakes))
        assert (found.shape, found.stride(), found.dtype) == (promised.shape, promised.stride(), promised.dtype)


# --- blocks ---


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.PReLU(8, 0.3), nn.PReLU(1, 0.3)], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_blocks_of_folded_layers(activation, residual, given):
    layer, x = (
        folded_layer("tanh-sqcos+product", bias=True, groups=1, last=True),
        torch.randn(2, 6, 7, 5, device=DEVICE),
    )
    activation = activation if activation is None else activation.to(DEVICE)
    added = torch.randn_like(layer(x)) if residual else None
    squares = x.square().sum(1) if given else None
    with torch.no_grad():
        wanted = layer.combine(ConvPatches(2, x, layer.weight, *layer.window))
        wanted = wanted if added is None else wanted + added
        wanted = wanted if activation is None else activation(wanted)
        output, onward, _ = kernels.block(x, squares, layer, None, activation, added, True)
    assert_close({"output": output, "squares": onward}, {"output": wanted, "squares": wanted.square().sum(1)}, 1e-5)


def test_compiled_blocks_of_folded_layers():
    layer, x = folded_layer("ball-cos", bias=False, groups=1, last=False), torch.randn(2, 6, 7, 5, device=DEVICE)
    call = torch.compile(kernels.block, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        arguments = (x, None, layer, None, nn.ReLU(), torch.randn_like(layer(x)), True)
        found, wanted = call(*arguments), kernels.block(*arguments)
    assert_close(dict(enumerate(found)), dict(enumerate(wanted)), 1e-6)


def test_rows_follow_the_bias_and_the_slopes():
    layer, prelu = folded_layer("ball-cos", bias=False, groups=1, last=False), nn.PReLU(8).to(DEVICE)
    before = layer.rows(prelu.weight)
    assert layer.rows(prelu.weight) is before
    with torch.no_grad():
        prelu.weight.fill_(0.5)
    assert layer.rows(prelu.weight)[2].tolist() == [0.5] * 8
    layer.bias.add_(1)
    assert torch.equal(layer.rows(prelu.weight)[1], layer.bias)


def test_launches_depend_on_the_dtypes_of_all_tensors():
    """A launch by addresses cannot check them."""
    layer, seen = folded_layer("tanh-cos", True, 1, False), []
    x, table = torch.randn(2, 6, 7, 5, device=DEVICE), layer.table()
    for given in (table, table.double()):
        before = folded_inference._passes.cache_info().currsize
        dispatch.folded(x, layer.weight, layer.bias, given, layer.operator, layer.eps, layer.window)
        seen.append(folded_inference._passes.cache_info().currsize - before)
    assert seen[1] == 1
