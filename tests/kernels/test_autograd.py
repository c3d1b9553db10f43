"""The fused kernels in autograd: saved and overwritten tensors, double backward, and the custom operations."""

import copy

import pytest
import torch
from helpers.kernel_comparison import (
    ON_GPU,
    TOLERANCE,
    assert_close,
    assert_same_bits,
    by_kernels,
    by_kernels_and_in_place,
    by_torch,
    by_torch_and_activated,
    check,
    cotangent_for,
    exact,
    images,
    make_layer,
    one_of_each,
    quiet_numpy,
    results,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

# An operator that saves its output, from which the backward pass recovers the angle, instead of inner products.
KEEPS_OUTPUT = "tanh-sqcos+joint"


# --- tensors changed in place ---


@pytest.mark.parametrize(("operator", "bias"), [*((name, False) for name in one_of_each()), ("tanh-sigmoid", True)])
def test_in_place_activation_can_overwrite_the_output(operator, bias):
    layer = make_layer(operator, padding=1, bias=bias)
    check(layer, images(1, 3, 4, 5), run=by_kernels_and_in_place, run_exactly=by_torch_and_activated)


def test_output_can_be_overwritten_between_two_backward_passes():
    layer, x = make_layer(KEEPS_OUTPUT, bias=False), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    (before,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with torch.no_grad():
        output.zero_()
    (after,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["input", "weight", "radius"])
@pytest.mark.parametrize("bias", [False, True])
def test_overwritten_input_raises(name, bias):
    layer, x = make_layer("tanh-cos", bias=bias), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    with torch.no_grad():
        (x if name == "input" else layer.get_parameter(name)).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- repeated, double and batched backward passes ---


@pytest.mark.parametrize("bias", [False, True])
def test_retained_graph_gives_the_same_gradients_again(bias):
    layer, x = make_layer("tanh-sigmoid+product", bias=bias), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    first, second = (torch.autograd.grad(output.sum(), [x, *layer.parameters()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layer_can_be_used_twice():
    layer = make_layer("tanh-cos", channels=3, filters=3, padding=1)

    def twice(run):
        return lambda layer, x: run(layer, run(layer, x))

    check(layer, images(2, 3, 5, 6), run=twice(by_kernels), run_exactly=twice(by_torch))


def gradients_of_gradients(run, layer, x, cotangent):
    cotangent = cotangent.to(x.dtype).requires_grad_()
    inputs = {"input": x, **dict(layer.named_parameters()), "cotangent": cotangent}
    output = run(layer, x)
    first = torch.autograd.grad(output, list(inputs.values())[:-1], cotangent, create_graph=True)
    squares = sum(gradient.square().sum() for gradient in first)
    second = torch.autograd.grad(squares, list(inputs.values()), materialize_grads=True)
    found = dict(zip(inputs, second, strict=True))
    return found | {f"{name} once": value for name, value in zip(inputs, (*first, output), strict=True)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", ["tanh-sigmoid(learnable=True)+product", "linear-cos", "log-sqcos"])
def test_double_backward(operator, training, bias):
    layer, x = make_layer(operator, bias=bias).train(training), images(2, 3, 4, 4)
    cotangent = cotangent_for(layer, x)
    double = x.double().requires_grad_()
    wanted = gradients_of_gradients(by_torch, exact(layer), double, cotangent)
    found = gradients_of_gradients(by_kernels, layer, x.requires_grad_(), cotangent)
    assert_close(found, wanted, 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("bias", [False, True])
def test_batched_gradients(bias):
    """The backward pass of a batch of cotangents, as for a Jacobian."""
    layer, x = make_layer("tanh-sqcos", bias=bias), images(2, 3, 4, 4).requires_grad_()
    cotangents = torch.stack([cotangent_for(layer, x) for _ in range(3)])
    output = by_kernels(layer, x)
    wanted = torch.stack([torch.autograd.grad(output, x, given, retain_graph=True)[0] for given in cotangents])
    (found,) = torch.autograd.grad(output, x, cotangents, is_grads_batched=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("create_graph", [False, True])
def test_running_mean_can_change_before_the_backward_pass(create_graph):
    """A layer in evaluation mode sees two batches, with a training step between them."""
    layer, x = make_layer("tanh-cos").eval(), images(2, 3, 5, 6).requires_grad_()
    layer.mean_norm.fill_(2.0)
    output, again = by_kernels(layer, x), by_kernels(layer, x)
    (wanted,) = torch.autograd.grad(output.sum(), x)
    layer.mean_norm.fill_(5.0)
    (found,) = torch.autograd.grad(again.sum(), x, create_graph=create_graph)
    torch.testing.assert_close(found.detach(), wanted)


# --- saved tensors ---


def bytes_kept_for_backward(layer, x):
    """The saved memory besides input, filters and output, which exist anyway; and the output."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = by_kernels(layer, x)
    for tensor in (x, layer.weight, output):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values()), output


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_norms_are_saved_besides_input_filters_and_output(dtype, layout):
    layer = make_layer(KEEPS_OUTPUT, filters=4, padding=1, bias=False, dtype=dtype)
    x = images(2, 3, 64, 64, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    found, output = bytes_kept_for_backward(layer, x)
    norms, small = 4 * output[:, 0].numel(), 2 * layer.weight.nbytes + 2048
    assert found <= norms + small


@pytest.mark.parametrize("operator", [KEEPS_OUTPUT, "linear-cos"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_output_without_gradients_is_the_same(mode, operator):
    layer, x = make_layer(operator, bias=False), images(2, 3, 5, 6)
    wanted = by_kernels(copy.deepcopy(layer), x)
    with mode():
        assert torch.equal(by_kernels(layer, x), wanted)


def kept_as_copies(layer, x):
    """Saves copies without the memory layout, as `save_on_cpu(pin_memory=True)` does."""

    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return by_kernels(layer, x)


def checkpointed(layer, x):
    return checkpoint(by_kernels_and_in_place, layer, x, use_reentrant=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_saved_tensors_can_be_moved(layout, bias):
    layer = make_layer(KEEPS_OUTPUT, bias=bias).to(memory_format=layout)
    check(layer, images(2, 3, 5, 6).contiguous(memory_format=layout), run=kept_as_copies)


@pytest.mark.parametrize("bias", [False, True])
def test_saved_tensors_can_be_recomputed(bias):
    layer, x = make_layer(KEEPS_OUTPUT, bias=bias), images(2, 3, 5, 6).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = results(by_kernels_and_in_place, copy.deepcopy(layer), x, cotangent)
    found = results(checkpointed, layer, x, cotangent)
    # The batch is counted twice, as by torch's batch normalization.
    assert (found.pop("num_batches_tracked"), wanted.pop("num_batches_tracked")) == (2, 1)
    assert_same_bits(found, wanted)


def test_gradients_accumulate_in_leaves():
    """Two calls of `backward`, as for parts of a batch."""
    layer, x = make_layer("tanh-cos", bias=False), images(2, 3, 5, 6)
    for _ in range(2):
        by_kernels(layer, x).sum().backward()
    accumulated = layer.weight.grad.clone()
    layer.zero_grad()
    by_kernels(layer, x).sum().backward()
    torch.testing.assert_close(accumulated, 2 * layer.weight.grad)


FIRST, LAST = torch.contiguous_format, torch.channels_last
LEARNING = "tanh(learnable=True)-sigmoid(learnable=True)+product"


class Watch(TorchDispatchMode):
    """Records the calls of operations of this library, as a profiler does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.namespace == "dcnet":
            self.calls.append((func, args, output))
        return output


def watched(layer, x):
    """The calls of both operations, forward and backward: function, arguments as leaves, and results."""
    with Watch() as watch:
        by_kernels(layer, x.requires_grad_()).sum().backward()
    assert [func.name() for func, _, _ in watch.calls] == ["dcnet::conv2d", "dcnet::conv2d_backward"]
    return [(func, tree_map_only(torch.Tensor, torch.Tensor.detach, args), out) for func, args, out in watch.calls]


def layout_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        ("tanh-cos", {"bias": False}),
        ("tanh-cos", {"bias": True, "stride": 2, "padding": (2, 1)}),
        (LEARNING, {"bias": True, "dilation": 2, "padding": "same"}),
        ("log-linear+joint", {"bias": False, "channels": 4, "filters": 6, "groups": 2}),
        ("linear(scale=-1.0)-sqcos", {"bias": False, "kernel": (1, 2)}),
    ],
)
@pytest.mark.parametrize(
    ("of_input", "of_filters", "dtype"),
    [
        (FIRST, FIRST, torch.bfloat16),
        (LAST, FIRST, torch.float32),
        (FIRST, LAST, torch.bfloat16),
    ],
)
def test_fake_results_have_the_real_shapes(operator, settings, of_input, of_filters, dtype):
    layer = make_layer(operator, dtype=dtype, **settings).eval().to(memory_format=of_filters)
    x = images(2, layer.in_channels, 7, 6, dtype=dtype).contiguous(memory_format=of_input)
    fake = FakeTensorMode()
    for func, args, output in watched(layer, x):
        promised = func(*tree_map_only(torch.Tensor, fake.from_tensor, args))
        assert [layout_of(tensor) for tensor in tree_leaves(promised)] == [
            layout_of(tensor) for tensor in tree_leaves(output)
        ]


@pytest.fixture
def _new_memory_is_zero(monkeypatch):
    """Results may have gaps that are never written or read; comparing all memory would see them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())


@quiet_numpy
@pytest.mark.usefixtures("_new_memory_is_zero")
@pytest.mark.parametrize(("operator", "bias", "training"), [("tanh-cos", False, True), (LEARNING, True, False)])
def test_operations_pass_opcheck(operator, bias, training):
    layer, x = make_layer(operator, bias=bias).eval(), images(2, 3, 5, 6)
    (forward, given, _), (backward, given_back, _) = watched(layer.train(training), x)
    named = dict(zip([argument.name for argument in forward._schema.arguments], given, strict=True))
    fixed = [id(named["running"]), id(named["tracked"])]
    learned = tree_map_only(torch.Tensor, lambda tensor: tensor.requires_grad_(id(tensor) not in fixed), given)
    torch.library.opcheck(forward, learned)
    torch.library.opcheck(backward, given_back, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("operator", "bias"), [("tanh-cos", False), (LEARNING, True)])
def test_dispatch_mode_changes_nothing(operator, bias, training):
    layer, x = make_layer(operator, bias=bias).train(training), images(2, 3, 5, 6).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = results(by_kernels, copy.deepcopy(layer), x, cotangent)
    with Watch() as watch:
        found = results(by_kernels, layer, x, cotangent)
    assert len(watch.calls) == 2
    assert_same_bits(found, wanted)


def test_in_place_activation_under_a_dispatch_mode():
    layer, x = make_layer("tanh-sqcos+joint", bias=False), images(2, 3, 5, 6).requires_grad_()
    with Watch():
        check(layer, x, run=by_kernels_and_in_place, run_exactly=by_torch_and_activated)


# --- torch.compile, on the CPU if there is no GPU ---


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager", **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("operator", "bias"), [("tanh-cos", False), (LEARNING, True)])
def test_compiled_layers_give_the_same(operator, bias, training):
    layer = make_layer(operator, bias=bias).train(training)
    check(layer, 0.4 * images(2, 3, 5, 6), run=compiled(by_kernels_or_layer))


def test_compiled_in_place_activation_can_overwrite_the_output():
    layer = make_layer("tanh-sqcos+joint", bias=False)
    run = compiled(lambda layer, x: by_kernels_or_layer(layer, x).mul_(-2).relu_())
    check(layer, images(2, 3, 5, 6), run=run, run_exactly=by_torch_and_activated)


def test_compiled_layers_accept_images_of_any_size():
    layer, run = make_layer("tanh-cos", bias=False, padding=1), compiled(by_kernels_or_layer, dynamic=True)
    for size in ((2, 3, 5, 6), (3, 3, 7, 5), (2, 3, 4, 9)):
        check(layer, images(*size), run=run)


def by_kernels_or_layer(layer, x):
    """A function that can be compiled, unlike the mock that counts calls on a GPU."""
    return layer(x) if ON_GPU else by_kernels(layer, x)
