"""The fused kernels in autograd: what they keep, what may be overwritten, and gradients of gradients."""

import copy

import pytest
import torch
from side_by_side import (
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
    results,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# From its output the angle can be told, and that is all that it keeps beside the norms.
KEEPS_OUTPUT = "tanh-sqcos+joint"


# --- in place ---


@pytest.mark.parametrize(("operator", "bias"), [*((name, False) for name in one_of_each()), ("tanh-sigmoid", True)])
def test_an_activation_may_overwrite_the_output(operator, bias):
    layer = make_layer(operator, padding=1, bias=bias)
    check(layer, images(1, 3, 4, 5), run=by_kernels_and_in_place, run_exactly=by_torch_and_activated)


def test_the_output_may_be_overwritten_between_two_backward_passes():
    layer, x = make_layer(KEEPS_OUTPUT, bias=False), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    (before,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with torch.no_grad():
        output.zero_()
    (after,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["input", "weight", "radius"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_input_that_was_overwritten_is_an_error(name, bias):
    layer, x = make_layer("tanh-cos", bias=bias), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    with torch.no_grad():
        (x if name == "input" else layer.get_parameter(name)).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- again and further ---


@pytest.mark.parametrize("bias", [False, True])
def test_a_graph_that_is_retained_gives_the_same_again(bias):
    layer, x = make_layer("tanh-sigmoid+product", bias=bias), images(2, 3, 5, 6).requires_grad_()
    output = by_kernels(layer, x)
    first, second = (torch.autograd.grad(output.sum(), [x, *layer.parameters()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_layer_may_be_used_twice():
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
def test_gradients_have_gradients(operator, training, bias):
    layer, x = make_layer(operator, bias=bias).train(training), images(2, 3, 4, 4)
    cotangent = cotangent_for(layer, x)
    double = x.double().requires_grad_()
    wanted = gradients_of_gradients(by_torch, exact(layer), double, cotangent)
    found = gradients_of_gradients(by_kernels, layer, x.requires_grad_(), cotangent)
    assert_close(found, wanted, 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("bias", [False, True])
def test_many_gradients_at_once(bias):
    """What a Jacobian is made of: the backward pass of a whole batch of cotangents."""
    layer, x = make_layer("tanh-sqcos", bias=bias), images(2, 3, 4, 4).requires_grad_()
    cotangents = torch.stack([cotangent_for(layer, x) for _ in range(3)])
    output = by_kernels(layer, x)
    wanted = torch.stack([torch.autograd.grad(output, x, given, retain_graph=True)[0] for given in cotangents])
    (found,) = torch.autograd.grad(output, x, cotangents, is_grads_batched=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_running_mean_may_change_before_the_backward_pass(create_graph):
    """As when a layer in evaluation meets two batches, with a training step between them."""
    layer, x = make_layer("tanh-cos").eval(), images(2, 3, 5, 6).requires_grad_()
    layer.mean_norm.fill_(2.0)
    output, again = by_kernels(layer, x), by_kernels(layer, x)
    (wanted,) = torch.autograd.grad(output.sum(), x)
    layer.mean_norm.fill_(5.0)
    (found,) = torch.autograd.grad(again.sum(), x, create_graph=create_graph)
    torch.testing.assert_close(found.detach(), wanted)


# --- what is kept ---


def bytes_kept_for_backward(layer, x):
    """Of all memory that is kept beside that of input, filters and output, which are there anyway; and the output."""
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
def test_kept_are_norms_beside_input_filters_and_output(dtype, layout):
    layer = make_layer(KEEPS_OUTPUT, filters=4, padding=1, bias=False, dtype=dtype)
    x = images(2, 3, 64, 64, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    found, output = bytes_kept_for_backward(layer, x)
    norms, small = 4 * output[:, 0].numel(), 2 * layer.weight.nbytes + 2048
    assert found <= norms + small


@pytest.mark.parametrize("operator", [KEEPS_OUTPUT, "linear-cos"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(mode, operator):
    layer, x = make_layer(operator, bias=False), images(2, 3, 5, 6)
    wanted = by_kernels(copy.deepcopy(layer), x)
    with mode():
        assert torch.equal(by_kernels(layer, x), wanted)


def kept_as_copies(layer, x):
    """As `save_on_cpu(pin_memory=True)` does it, which forgets how a tensor lay in memory."""

    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return by_kernels(layer, x)


def checkpointed(layer, x):
    return checkpoint(by_kernels_and_in_place, layer, x, use_reentrant=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_what_is_kept_may_be_moved(layout, bias):
    layer = make_layer(KEEPS_OUTPUT, bias=bias).to(memory_format=layout)
    check(layer, images(2, 3, 5, 6).contiguous(memory_format=layout), run=kept_as_copies)


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_kept_may_be_formed_again(bias):
    layer, x = make_layer(KEEPS_OUTPUT, bias=bias), images(2, 3, 5, 6).requires_grad_()
    cotangent = cotangent_for(layer, x)
    wanted = results(by_kernels_and_in_place, copy.deepcopy(layer), x, cotangent)
    found = results(checkpointed, layer, x, cotangent)
    # The batch is seen twice, as by torch's own batch normalisation.
    assert (found.pop("num_batches_tracked"), wanted.pop("num_batches_tracked")) == (2, 1)
    assert_same_bits(found, wanted)


def test_gradients_add_up_in_leaves():
    """`backward` twice, as over the parts of a batch."""
    layer, x = make_layer("tanh-cos", bias=False), images(2, 3, 5, 6)
    for _ in range(2):
        by_kernels(layer, x).sum().backward()
    accumulated = layer.weight.grad.clone()
    layer.zero_grad()
    by_kernels(layer, x).sum().backward()
    torch.testing.assert_close(accumulated, 2 * layer.weight.grad)
