"""The fused convolution as operations of torch, for whatever traces: shapes, compilers, modes."""

import copy

import pytest
import torch
from side_by_side import (
    ON_GPU,
    assert_same_bits,
    by_kernels,
    by_kernels_and_in_place,
    by_torch_and_activated,
    check,
    cotangent_for,
    images,
    make_layer,
    quiet_numpy,
    results,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FIRST, LAST = torch.contiguous_format, torch.channels_last
LEARNING = "tanh(learnable=True)-sigmoid(learnable=True)+product"


class Watch(TorchDispatchMode):
    """Looks on, as a profiler does, and writes down what is called of this library."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.namespace == "dcnet":
            self.calls.append((func, args, output))
        return output


def watched(layer, x):
    """The calls of both operations, forward and backward: function, leaves as arguments, and what they gave."""
    with Watch() as watch:
        by_kernels(layer, x.requires_grad_()).sum().backward()
    assert [func.name() for func, _, _ in watch.calls] == ["dcnet::conv2d", "dcnet::conv2d_backward"]
    return [(func, tree_map_only(torch.Tensor, torch.Tensor.detach, args), out) for func, args, out in watch.calls]


def told(tensor):
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
def test_compilers_are_told_the_true_shapes(operator, settings, of_input, of_filters, dtype):
    layer = make_layer(operator, dtype=dtype, **settings).eval().to(memory_format=of_filters)
    x = images(2, layer.in_channels, 7, 6, dtype=dtype).contiguous(memory_format=of_input)
    fake = FakeTensorMode()
    for func, args, output in watched(layer, x):
        promised = func(*tree_map_only(torch.Tensor, fake.from_tensor, args))
        assert [told(tensor) for tensor in tree_leaves(promised)] == [told(tensor) for tensor in tree_leaves(output)]


@pytest.fixture
def _new_memory_is_zero(monkeypatch):
    """An operation may give gaps that nobody writes or reads; a comparison of all that it gives would see them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())


@quiet_numpy
@pytest.mark.usefixtures("_new_memory_is_zero")
@pytest.mark.parametrize(("operator", "bias", "training"), [("tanh-cos", False, True), (LEARNING, True, False)])
def test_operations_keep_torchs_rules(operator, bias, training):
    layer, x = make_layer(operator, bias=bias).eval(), images(2, 3, 5, 6)
    (forward, given, _), (backward, given_back, _) = watched(layer.train(training), x)
    named = dict(zip([argument.name for argument in forward._schema.arguments], given, strict=True))
    fixed = [id(named["running"]), id(named["tracked"])]
    learned = tree_map_only(torch.Tensor, lambda tensor: tensor.requires_grad_(id(tensor) not in fixed), given)
    torch.library.opcheck(forward, learned)
    torch.library.opcheck(backward, given_back, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("operator", "bias"), [("tanh-cos", False), (LEARNING, True)])
def test_a_mode_that_looks_on_changes_nothing(operator, bias, training):
    layer, x = make_layer(operator, bias=bias).train(training), images(2, 3, 5, 6).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = results(by_kernels, copy.deepcopy(layer), x, cotangent)
    with Watch() as watch:
        found = results(by_kernels, layer, x, cotangent)
    assert len(watch.calls) == 2
    assert_same_bits(found, wanted)


def test_an_activation_may_overwrite_the_output_while_a_mode_looks_on():
    layer, x = make_layer("tanh-sqcos+joint", bias=False), images(2, 3, 5, 6).requires_grad_()
    with Watch():
        check(layer, x, run=by_kernels_and_in_place, run_exactly=by_torch_and_activated)


# --- torch.compile, as far as it goes without a GPU ---


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager", **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("operator", "bias"), [("tanh-cos", False), (LEARNING, True)])
def test_compiled_layers_give_the_same(operator, bias, training):
    layer = make_layer(operator, bias=bias).train(training)
    check(layer, 0.4 * images(2, 3, 5, 6), run=compiled(by_kernels_or_layer))


def test_a_compiled_activation_may_overwrite_the_output():
    layer = make_layer("tanh-sqcos+joint", bias=False)
    run = compiled(lambda layer, x: by_kernels_or_layer(layer, x).mul_(-2).relu_())
    check(layer, images(2, 3, 5, 6), run=run, run_exactly=by_torch_and_activated)


def test_compiled_layers_take_images_of_any_size():
    layer, run = make_layer("tanh-cos", bias=False, padding=1), compiled(by_kernels_or_layer, dynamic=True)
    for size in ((2, 3, 5, 6), (3, 3, 7, 5), (2, 3, 4, 9)):
        check(layer, images(*size), run=run)


def by_kernels_or_layer(layer, x):
    """What can be compiled: the mock that counts calls on a GPU cannot."""
    return layer(x) if ON_GPU else by_kernels(layer, x)
