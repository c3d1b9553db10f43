"""The fused kernels on a GPU: compilers, CUDA graphs, autocast, exports and transforms."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from helpers.kernel_comparison import (
    HALVES,
    TOLERANCE,
    assert_close,
    by_kernels,
    by_torch,
    check,
    cotangent_for,
    exact,
    expected,
    images,
    make_layer,
    results,
)
from torch import nn
from torch._dynamo import lookup_backend

import dcnet
from dcnet.kernels import use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEARNING = "tanh(learnable=True)-sigmoid(learnable=True)+product"


@contextlib.contextmanager
def kernels_untouched():
    """Fails if a kernel is called."""
    with mock.patch.object(dcnet.kernels, "conv2d", side_effect=AssertionError("took the kernels")):
        yield


# --- sizes of real networks ---


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING])
def test_layers_of_real_size(operator, dtype, layout):
    layer = make_layer(operator, 64, 96, padding=1, stride=2, bias=False, dtype=dtype)
    check(layer, images(16, 64, 57, 55, dtype=dtype).contiguous(memory_format=layout))


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_padding_modes(mode):
    check(make_layer("tanh-cos", padding=1, padding_mode=mode), images(2, 3, 5, 6))


def test_custom_streams():
    layer, x = make_layer(LEARNING, 8, 16, padding=1), images(8, 8, 40, 40).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = expected(layer, x, cotangent)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = results(by_kernels, layer, x, cotangent)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(found, wanted, 10 * TOLERANCE[torch.float32])


def test_memory_is_not_reused_while_a_side_stream_reads_it():
    """Many steps with allocations between them that would reuse memory released too early."""
    layer, x = make_layer(LEARNING, 16, 32, padding=1).eval(), images(16, 16, 56, 56).requires_grad_()
    cotangent = cotangent_for(layer, x)
    first = results(by_kernels, layer, x, cotangent)
    for _ in range(50):
        again = results(by_kernels, layer, x, cotangent)
        torch.full((16, 32, 56, 56), float("nan"), device="cuda")
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(("stride", "padding"), [(2, "same"), (1, "smae")])
def test_invalid_padding_raises(stride, padding):
    x, weight = images(2, 3, 5, 6), images(4, 3, 3, 3)
    with pytest.raises((RuntimeError, ValueError)):
        dcnet.functional.decoupled_conv2d(x, weight, stride=stride, padding=padding, operator="tanh-cos")


# --- torch.compile and CUDA graphs ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING, "linear-cos"])
def test_compiled_networks(operator, dtype):
    """A layer and an in-place activation: inductor may reorder and fuse everything except the operation.

    The activation has no kink, around which half precision would change the gradient.
    """
    net = nn.Sequential(make_layer(operator, 3, 8, bias=False, dtype=dtype), nn.ELU(inplace=True), nn.AvgPool2d(2))
    torch.compiler.reset()
    check(net, images(2, 3, 9, 9, dtype=dtype), run=torch.compile(by_torch, fullgraph=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING])
def test_compiled_folded_networks(operator, layout, dtype):
    """Sizes change from layer to layer, and the compiled network uses the kernels for each of them."""
    convolutions = [make_layer(operator, 3, 8, padding=1), make_layer(operator, 8, 16, stride=2, groups=2, bias=False)]
    net = nn.Sequential(convolutions[0], nn.BatchNorm2d(8), nn.ELU(inplace=True), convolutions[1]).cuda()
    for _ in range(3):
        net(images(4, 3, 9, 9))
    x = images(4, 3, 9, 9, dtype=dtype).contiguous(memory_format=layout)
    folded = dcnet.fold(net.eval()).to(dtype).to(memory_format=layout)
    torch.compiler.reset()
    calls = []

    def count(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return lookup_backend("inductor")(graph, inputs)

    with torch.no_grad():
        wanted = net.double()(x.double())
        found = torch.compile(folded, fullgraph=True, backend=count)(x)
        eager = folded(x)
    assert calls.count("dcnet.folded_conv2d.default") == 2
    assert found.dtype == dtype
    tolerance = 2 * TOLERANCE[dtype]
    assert_close({"output": found}, {"output": wanted}, tolerance)
    assert_close({"output": eager}, {"output": wanted}, tolerance)


def train_step(layer, x, cotangent):
    return torch.autograd.grad(by_kernels(layer, x), [x, *layer.parameters()], cotangent)


@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING, "linear-cos"])
def test_captured_graphs_replay_with_new_values(operator):
    layer, x = make_layer(operator, 8, 16, padding=1, bias=False), images(4, 8, 20, 20).requires_grad_()
    cotangent, side = cotangent_for(layer, x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(layer, x, cotangent)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train_step(layer, x, cotangent)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(images(*x.shape))
            layer.weight.mul_(1.1)
        wanted = expected(layer, x, cotangent)
        wanted.pop("output")
        graph.replay()
        found = dict(zip(["input", *dict(layer.named_parameters())], captured, strict=True))
        assert_close(found | dict(layer.named_buffers()), wanted, 1e-4)


# --- autocast ---


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING, "linear-cos"])
def test_autocast_casts_the_input_and_reads_filters_in_float32(operator, compiled, dtype):
    layer, x = make_layer(operator, 8, 16, bias=False), images(4, 8, 20, 20).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = expected(layer, x, cotangent)
    run = torch.compile(by_torch, fullgraph=True) if compiled else by_kernels
    # The cache of torch 2.11 does not distinguish the dtypes of autocast.
    with torch.autocast("cuda", dtype), torch._functorch.config.patch(enable_autograd_cache=False):
        found = results(run, layer, x, cotangent)
    assert found["output"].dtype == dtype
    others = [value for name, value in found.items() if name not in ("output", "num_batches_tracked")]
    assert all(value.dtype == torch.float32 for value in others)
    assert_close(found, wanted, 2 * TOLERANCE[dtype])


# --- fallback to torch ---


def test_export_uses_torch():
    layer, x = make_layer("tanh-cos").eval(), images(2, 3, 5, 6)
    program = torch.export.export(layer, (x,))
    assert not any(str(node.target).startswith("dcnet") for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), by_kernels(layer, x), rtol=1e-4, atol=1e-5)


def test_functorch_transforms_use_torch():
    layer, x = make_layer("tanh-cos").eval(), images(4, 2, 3, 5, 6)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    with kernels_untouched():
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        gradients = torch.autograd.grad(by_kernels(layer, x[i]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-3, atol=1e-4)


def test_kernels_can_be_turned_off():
    layer, x = make_layer("tanh-cos"), images(2, 3, 5, 6)
    wanted = by_kernels(copy.deepcopy(layer), x)
    with use_kernels(False), kernels_untouched():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", ["tanh-spline", "tanh&log-cos", "linear-relucos"])
def test_other_operators_use_torch(operator):
    with kernels_untouched():
        make_layer(operator)(images(2, 3, 5, 6)).sum().backward()


def test_float64_and_single_images_use_torch():
    layer = make_layer("tanh-cos")
    with kernels_untouched():
        layer(images(3, 5, 6))
        exact(layer)(images(2, 3, 5, 6).double())


# --- fused blocks in networks ---


def network(name="resnet32", **settings):
    torch.manual_seed(0)
    model = dcnet.create_model(name, "tanh-cos", 10, width=0.25, **settings).cuda()
    return model.to(memory_format=torch.channels_last)


def training_step(model, x, labels):
    """The loss of a step under autocast, and the gradients."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def batch_for(count=32):
    images = torch.randn(count, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    return images, torch.randint(10, (count,), device="cuda")


def relative(found, wanted):
    return ((found - wanted).double().norm() / wanted.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("name", ["resnet32", "cnn9", "resnet18-modified", "sphereface20"])
def test_fused_networks_match_their_modules(name):
    """In float32: output and running statistics, and gradients as close to those in float64 as without fusing.

    A value near the kink of an activation that is rounded to its other side changes all gradients before it a little.
    """
    fused, x = network(name, image_size=32), batch_for()[0]
    plain, exactly = dcnet.unfuse(copy.deepcopy(fused)), dcnet.unfuse(copy.deepcopy(fused)).double()
    with mock.patch.object(dcnet.kernels, "block", wraps=dcnet.kernels.block) as taken:
        found = fused(x)
    assert taken.call_count == len(dcnet.fusion_report(fused).fused) > 0
    wanted = plain(x)
    assert relative(found, wanted) < 1e-4
    for output in (found, wanted, exactly(x.double())):
        output.square().sum().backward()
    errors = [
        sum(relative(one.grad.double(), other.grad) for one, other in zip(*both, strict=True))
        for both in ((model.parameters(), exactly.parameters()) for model in (fused, plain))
    ]
    assert errors[0] <= 1.5 * errors[1] + 1e-3
    for one, other in zip(fused.buffers(), plain.buffers(), strict=True):
        assert relative(one.float(), other.float()) < 1e-4


def test_fused_networks_in_a_graph():
    """Filters are prepared on a side stream: replays give the losses of an eager network, step by step."""
    captured, (x, labels) = network(), batch_for()
    eager = copy.deepcopy(captured)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (captured, eager)]
    loss = torch.zeros((), device="cuda")

    def step(model, optimizer):
        found, _ = training_step(model, x, labels)
        optimizer.step()
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [step(captured, optimizers[0]).item() for _ in range(2)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss.copy_(step(captured, optimizers[0]))
    for _ in range(4):
        graph.replay()
        losses.append(loss.item())
    expected = [step(eager, optimizers[1]).item() for _ in range(6)]
    assert losses == pytest.approx(expected, rel=2e-3)
    assert losses[-1] < losses[0]


def test_fused_networks_are_closer_to_float64_than_their_modules():
    fused, (x, labels) = network(), batch_for(64)
    plain, exact_network = dcnet.unfuse(copy.deepcopy(fused)), dcnet.unfuse(copy.deepcopy(fused)).double()
    exact_network.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(exact_network(x.double()), labels).backward()
    wanted = [parameter.grad for parameter in exact_network.parameters()]
    errors = [
        [relative(one.double(), other) for one, other in zip(training_step(model, x, labels)[1], wanted, strict=True)]
        for model in (fused, plain)
    ]
    assert sum(errors[0]) <= 1.1 * sum(errors[1])


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_fused_networks_compile():
    fused, (x, labels) = network(), batch_for()
    compiled = torch.compile(copy.deepcopy(fused), fullgraph=True, dynamic=False)
    found, wanted = [training_step(compiled, x, labels)[0] for _ in range(2)], training_step(fused, x, labels)[0]
    assert found[0].item() == pytest.approx(wanted.item(), rel=5e-3)
    for one, other in zip(compiled.buffers(), fused.buffers(), strict=True):
        assert one.shape == other.shape
    assert all(buffer.isfinite().all() for buffer in compiled.buffers())


@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("compiled", [False, True])
def test_folded_networks_use_blocks(compiled):
    model, x = network(), batch_for()[0]
    model(x)
    with torch.no_grad():
        wanted = model.eval()(x)
        folded = dcnet.fold(model)
        with mock.patch.object(dcnet.kernels, "block", wraps=dcnet.kernels.block) as taken:
            assert relative(folded(x), wanted) < 1e-4
        assert taken.call_count == 31
        if compiled:
            assert relative(torch.compile(folded, fullgraph=True, dynamic=False)(x), wanted) < 1e-4
