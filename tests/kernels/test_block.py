"""Fused blocks compared with their modules in float64: outputs, all gradients, squares and running statistics."""

import copy
from unittest import mock

import pytest
import torch
from helpers.kernel_comparison import (
    DEVICE,
    HALVES,
    ON_GPU,
    TOLERANCE,
    alternating,
    assert_close,
    assert_same_bits,
    fused_operators,
    images,
    make_layer,
    one_of_each,
    quiet_numpy,
)
from helpers.operators import pairwise_operators
from sklearn.datasets import load_digits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dcnet
from dcnet import kernels

FILTERS = 5
SMOOTH = {"relu6": nn.ReLU6(), "silu": nn.SiLU(), "hardswish": nn.Hardswish()}


class Modules(nn.Module):
    """The modules of a block: activation(norm(layer(x)) + residual)."""

    def __init__(self, layer, norm=None, activation=None):
        super().__init__()
        self.layer, self.norm, self.activation = layer, norm, activation

    def forward(self, x, residual=None):
        """The output and its squares, by the modules one by one."""
        y = self.layer(x)
        y = y if self.norm is None else self.norm(y)
        y = y if residual is None else y + residual
        y = y if self.activation is None else self.activation(y)
        return y, y.square().sum(1)


def batch_norm(filters=FILTERS, **settings):
    """A batch normalization with different values in every channel, as after training."""
    norm = nn.BatchNorm2d(filters, **settings)
    with torch.no_grad():
        if norm.affine:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()
        if norm.running_mean is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked.fill_(3)
    return norm.to(DEVICE)


def make_block(operator="tanh-cos", norm=True, activation="relu", dtype=torch.float32, channels=3, **settings):
    settings = {"padding": 1, "bias": False, **settings}
    layer = make_layer(operator, channels, FILTERS, dtype=dtype, **settings)
    norm = batch_norm() if norm is True else norm
    activations = {"relu": nn.ReLU(), "prelu": nn.PReLU(FILTERS, 0.3), "shared": nn.PReLU(init=0.3), **SMOOTH}
    return Modules(layer, norm, activations.get(activation)).to(DEVICE)


def by_kernels(block, x, squares, residual):
    return kernels.block(x, squares, block.layer, block.norm, block.activation, residual, True)[:2]


def by_modules(block, x, squares, residual):
    return block(x, residual)


def results(run, block, x, residual, cotangents, squares=None):
    """Output, squares, every gradient and every buffer, by name."""
    tensors = {"input": x, "residual": residual, "given": squares, **dict(block.named_parameters())}
    wanted = {name: value for name, value in tensors.items() if value is not None and value.requires_grad}
    output, onward = run(block, x, squares, residual)
    sums = (output.double() * cotangents[0]).sum() + (onward.double() * cotangents[1]).sum()
    gradients = torch.autograd.grad(sums, list(wanted.values()))
    buffers = {name: value.clone() for name, value in block.named_buffers()}
    found = {"output": output.detach(), "squares": onward.detach(), **dict(zip(wanted, gradients, strict=True))}
    return {**found, **buffers}


def doubled(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


def cotangents_for(block, x, residual):
    with torch.no_grad():
        output, squares = copy.deepcopy(block).double()(x.double(), doubled(residual))
    return torch.randn_like(output), 0.1 * torch.randn_like(squares)


def expected(block, x, residual, cotangents):
    return results(by_modules, copy.deepcopy(block).double(), doubled(x), doubled(residual), cotangents)


def residual_for(block, x):
    with torch.no_grad():
        return torch.randn_like(copy.deepcopy(block.layer)(x)).requires_grad_()


def check(block, x, residual=None, tolerance=None, run=by_kernels):
    """Checks that the fused block gives the results of its modules in float64."""
    x.requires_grad_()
    cotangents = cotangents_for(block, x, residual)
    wanted = expected(block, x, residual, cotangents)
    flipped = [cotangent * torch.randn_like(cotangent).sign() for cotangent in cotangents]
    others = expected(block, x, residual, flipped)
    # A sum may happen to cancel: the size of a result is that with other signs of the cotangent, if larger.
    scale = {name: max(value.double().norm(), others[name].double().norm()).item() for name, value in wanted.items()}
    found = results(run, block, x, residual, cotangents)
    assert_close(found, wanted, tolerance or TOLERANCE[x.dtype], {name: max(s, 1e-3) for name, s in scale.items()})
    assert found["output"].dtype == x.dtype


@pytest.mark.parametrize("operator", [name for name in fused_operators() if name in pairwise_operators()])
def test_every_pair_of_magnitude_angle_and_weighting(operator):
    check(make_block(operator), images(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("operator", "residual", "activation", "norm"),
    alternating(
        one_of_each(),
        [(True, "relu", True), (False, "prelu", True), (False, "shared", None), (True, "none", None)],
    ),
)
def test_combinations(operator, residual, activation, norm):
    block, x = make_block(operator, norm, activation, bias=norm is None), images(2, 3, 4, 5)
    check(block, x, residual_for(block, x) if residual else None)


@pytest.mark.parametrize("operator", ["linear-cos", "linear-cos+linear", "linear(scale=2.0)-cos"])
@pytest.mark.parametrize(("residual", "norm"), [(False, True), (True, True), (True, None)])
def test_operators_without_patch_norms(operator, residual, norm):
    block, x = make_block(operator, norm, bias=norm is None, stride=2), images(2, 3, 5, 6)
    check(block, x, residual_for(block, x) if residual else None)


def test_squares_are_ignored_without_patch_norms():
    block, x = make_block("linear-cos"), images(2, 3, 4, 5).requires_grad_()
    squares = torch.full((2, 4, 5), torch.nan, device=DEVICE, requires_grad=True)
    output, onward = by_kernels(block, x, squares, None)
    found = torch.autograd.grad(output.sum() + onward.sum(), [x, squares], allow_unused=True)
    assert found[0].isfinite().all()
    assert found[1] is None


@pytest.mark.parametrize("norm", [True, None])
@pytest.mark.parametrize("activation", SMOOTH)
def test_activations(activation, norm):
    block, x = make_block("seg-cos", norm, activation), 10 * images(2, 3, 4, 5)
    if norm:
        with torch.no_grad():
            block.norm.weight.fill_(4)
    check(block, x)
    values = Modules(block.layer, block.norm)(x)[0]
    assert values.min() < -3
    assert values.max() > 6


@pytest.mark.parametrize("dtype", HALVES)
def test_a_smooth_activation_in_half_precision(dtype):
    check(make_block(activation="silu", dtype=dtype), images(2, 3, 6, 5, dtype=dtype), None, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("residual", [False, True])
def test_half_precision(dtype, residual):
    """Without an activation: a rounded value at its kink would change a gradient by all of it."""
    block, x = make_block(activation="none", dtype=dtype), images(2, 3, 6, 5, dtype=dtype)
    check(block, x, residual_for(block, x) if residual else None, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "norm",
    [
        {"momentum": None},
        {"momentum": 1.0},
        {"track_running_stats": False},
        {"affine": False},
        {"eps": 0.1},
    ],
    ids=str,
)
def test_settings_of_the_normalization(norm):
    check(make_block(norm=batch_norm(**norm)), images(2, 3, 4, 5))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_running_statistics_are_used_in_evaluation(bias, residual):
    block, x = make_block(bias=bias), images(2, 3, 4, 5)
    block(x)
    check(block.eval(), x, residual_for(block, x) if residual else None)


def test_a_frozen_normalization_in_training():
    block, x = make_block(), images(2, 3, 4, 5)
    block.norm.eval()
    check(block, x)


def test_evaluation_without_running_statistics():
    check(make_block(norm=batch_norm(track_running_stats=False)), images(2, 3, 4, 5))
    block, x = make_block(norm=batch_norm(track_running_stats=False)), images(2, 3, 4, 5)
    block.norm.eval()
    check(block, x)


def test_a_bias_before_the_normalization():
    """It moves the running mean, and cancels in the output."""
    block, x = make_block(bias=True), images(2, 3, 4, 5)
    before = block.norm.running_mean.clone()
    check(block, x)
    assert not torch.equal(before, block.norm.running_mean)


@pytest.mark.parametrize(
    "window",
    [
        {"stride": 2},
        {"kernel": 1, "padding": 0},
        {"kernel": 5, "padding": 2},
        {"padding": 0, "dilation": 2},
        {"padding": "same"},
        {"stride": (2, 1), "padding": (0, 1)},
    ],
    ids=str,
)
def test_windows(window):
    block, x = make_block(**window), images(2, 3, 7, 6)
    check(block, x, residual_for(block, x))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 2, 5), (3, 3, 9, 7), (2, 3, 40, 33)], ids=str)
def test_layouts_and_sizes(shape, last):
    block, x = make_block(), images(*shape)
    if last:
        block, x = block.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    check(block, x, residual_for(block, x))


@pytest.mark.parametrize("filters", [48, 33])
def test_chunks_of_channels(filters):
    layer = make_layer("seg-sqcos+product", 3, filters, padding=1, bias=False).to(memory_format=torch.channels_last)
    block = Modules(layer, batch_norm(filters), nn.ReLU())
    check(block, images(2, 3, 5, 5).contiguous(memory_format=torch.channels_last))


def test_a_mean_far_from_zero():
    """The variance of a channel keeps its digits if its mean is much larger."""
    block, x = make_block("sphere-cos", activation="none", channels=40), images(2, 40, 6, 6)
    with torch.no_grad():
        x.mul_(1e-3).add_(1)
        block.layer.weight.abs_()
    check(block, x, tolerance=3e-3)


def test_given_squares():
    """The gradient of the norms goes to the squares instead of the input."""
    block, x = make_block(), images(2, 3, 4, 5).requires_grad_()
    cotangents = cotangents_for(block, x, None)
    wanted = results(by_kernels, copy.deepcopy(block), x, None, cotangents)
    squares = x.detach().square().sum(1).requires_grad_()
    found = results(by_kernels, block, x, None, cotangents, squares)
    found["input"] = found["input"] + 2 * x.detach() * found.pop("given").unsqueeze(1)
    assert_close(found, wanted, 1e-6)


def two_blocks(first, second, hands):
    """The second block also adds its input, as in a residual network."""

    def run(x):
        y, squares = by_kernels(first, x, None, None)
        return by_kernels(second, y, squares if hands else None, y)

    return run


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_squares_are_handed_from_block_to_block(activation):
    first, second = make_block(activation=activation), make_block("ball-sqcos", channels=FILTERS)
    x, found = images(2, 3, 4, 5).requires_grad_(), []
    parameters = [x, *first.parameters(), *second.parameters()]
    for hands in (True, False):
        torch.manual_seed(1)
        output, squares = two_blocks(first, second, hands)(x)
        loss = (output * torch.randn_like(output)).sum() + squares.sum()
        found.append(torch.autograd.grad(loss, parameters))
    assert_close(dict(enumerate(found[0])), dict(enumerate(found[1])), 1e-5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", [True, None])
def test_two_users_of_the_output(norm, residual):
    """The backward pass adds the gradients of both."""

    def run(block, x, squares, residual):
        modules = (block.layer, block.norm, block.activation)
        output, onward, again = kernels.block(x, squares, *modules, residual, True)
        assert again.data_ptr() == output.data_ptr()
        return 0.7 * output + 0.3 * again, onward

    block, x = make_block(norm=norm), images(2, 3, 4, 5)
    check(block, x, residual_for(block, x) if residual else None, run=run)


def test_squares_that_nobody_uses():
    block, x = make_block(), images(2, 3, 4, 5).requires_grad_()
    output, _ = by_kernels(block, x, None, None)
    (found,) = torch.autograd.grad(output.square().sum(), [x])
    (wanted,) = torch.autograd.grad(copy.deepcopy(block)(x)[0].square().sum(), [x])
    assert_close({"x": found}, {"x": wanted}, 1e-4)


def test_only_squares_have_a_gradient():
    block, x = make_block(), images(2, 3, 4, 5).requires_grad_()
    (found,) = torch.autograd.grad(by_kernels(block, x, None, None)[1].sum(), [x])
    (wanted,) = torch.autograd.grad(copy.deepcopy(block)(x)[1].sum(), [x])
    assert_close({"x": found}, {"x": wanted}, 1e-4)


def test_without_a_gradient_the_result_is_the_same():
    block, x = make_block(), images(2, 3, 4, 5)
    residual = residual_for(block, x)
    wanted = by_kernels(copy.deepcopy(block), x.clone().requires_grad_(), None, residual)
    with torch.no_grad():
        found = by_kernels(block, x, None, residual)
    assert_same_bits(dict(enumerate(found)), {i: value.detach() for i, value in enumerate(wanted)})


def test_results_are_the_same_each_time():
    block, x = make_block(), images(4, 3, 33, 17).requires_grad_()
    cotangents = cotangents_for(block, x, None)
    first = results(by_kernels, copy.deepcopy(block), x, None, cotangents)
    assert_same_bits(results(by_kernels, copy.deepcopy(block), x, None, cotangents), first)


@pytest.mark.parametrize("part", ["layer", "norm", "input"])
def test_parts_without_a_gradient(part):
    block, x = make_block(), images(2, 3, 4, 5)
    if part != "input":
        getattr(block, part).requires_grad_(False)
    cotangents = cotangents_for(block, x, None)
    x.requires_grad_(part != "input")
    assert_close(results(by_kernels, block, x, None, cotangents), wanted_before(block, x, cotangents), 1e-4)


def wanted_before(block, x, cotangents):
    """The expected results; the buffers of the block were updated by the fused block already, so they are left out."""
    fresh = copy.deepcopy(block).double()
    found = results(by_modules, fresh, doubled(x), None, cotangents)
    return {**found, **{name: value.clone() for name, value in block.named_buffers()}}


@quiet_numpy
@pytest.mark.parametrize("factor", [0.0, 1e-20, 1e18])
def test_extreme_inputs_stay_finite(factor):
    block = make_block("tanh-cos")
    x = (images(2, 3, 4, 5) * factor).requires_grad_()
    output, squares = by_kernels(block, x, None, None)
    gradients = torch.autograd.grad(output.sum() + squares.sum(), [x, *block.parameters()])
    assert all(tensor.isfinite().all() for tensor in (output, squares, *gradients))


def test_a_gradient_that_is_differentiated_again():
    block, x = make_block("ball-cos", activation="prelu"), images(2, 3, 4, 5).requires_grad_()

    def second(run):
        output, squares = run(copy.deepcopy(block), x, None, None)
        (first,) = torch.autograd.grad(output.sin().sum() + 0.1 * squares.sum(), [x], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x])[0]

    assert_close({"x": second(by_kernels)}, {"x": second(by_modules)}, 1e-4)


def test_a_residual_cannot_be_differentiated_again():
    block, x = make_block(), images(2, 3, 4, 5).requires_grad_()
    output, _ = by_kernels(block, x, None, residual_for(block, x))
    with pytest.raises(RuntimeError, match="unfuse"):
        torch.autograd.grad(output.sum(), [x], create_graph=True)


def test_gradients_of_a_batch_of_losses():
    block, x = make_block("ball-cos", activation="prelu"), images(2, 3, 4, 5).requires_grad_()
    cotangents = images(3, 2, FILTERS, 4, 5)

    def batch(run):
        output, _ = run(copy.deepcopy(block), x, None, None)
        return torch.autograd.grad(output, [x], [cotangents], is_grads_batched=True)[0]

    assert_close({"x": batch(by_kernels)}, {"x": batch(by_modules)}, 1e-4)
    output, _ = by_kernels(make_block(), x, None, residual_for(block, x))
    with pytest.raises(RuntimeError, match="unfuse"):
        torch.autograd.grad(output, [x], [cotangents], is_grads_batched=True)


def test_inference_mode_records_no_gradients():
    block, x = make_block().eval(), images(2, 3, 4, 5)
    with torch.inference_mode(), torch.enable_grad():
        assert_close({"output": by_kernels(block, x, None, None)[0]}, {"output": block(x)[0]}, 1e-5)


def by_kernels_with_hooks(block, x, squares, residual):
    """Hooks that bring saved tensors back in another layout, as those of `save_on_cpu` do."""

    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return by_kernels(block, x, squares, residual)


@pytest.mark.parametrize("residual", [False, True])
def test_saved_tensors_in_another_layout(residual):
    block, x = make_block().to(memory_format=torch.channels_last), images(2, 3, 4, 5)
    x = x.to(memory_format=torch.channels_last)
    check(block, x, residual_for(block, x) if residual else None, run=by_kernels_with_hooks)


@pytest.mark.parametrize("residual", [False, True])
def test_compiled(residual):
    """As a custom operation, with the running statistics returned and copied."""
    block, x = make_block(bias=True), images(2, 3, 4, 5)

    def run(block, x, squares, residual):
        call = torch.compile(by_kernels, backend="aot_eager", fullgraph=True)
        return call(block, x, squares, residual)

    check(block, x, residual_for(block, x) if residual else None, run=run)


def test_compiled_with_given_squares():
    first, second = make_block(activation="prelu"), make_block("ball-sqcos", activation="none", channels=FILTERS)
    x = images(2, 3, 4, 5).requires_grad_()
    parameters, found = [x, *first.parameters(), *second.parameters()], []
    run = two_blocks(first, second, True)
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        output, squares = call(x)
        found.append(torch.autograd.grad((output.sin() + squares.unsqueeze(1)).sum(), parameters))
    assert_close(dict(enumerate(found[0])), dict(enumerate(found[1])), 1e-5)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_autocast_takes_float32_inputs():
    block, x = make_block(), images(2, 3, 6, 5)
    with torch.autocast("cuda", torch.bfloat16):
        assert kernels.fits_block(x, None, block.layer, block.norm, block.activation, None)
        output, squares = by_kernels(block, x, None, None)
    assert output.dtype == torch.bfloat16
    assert squares.dtype == torch.float32
    assert_close({"y": output}, {"y": copy.deepcopy(block).double()(x.double())[0]}, 2e-2)


# --- which blocks fit ---


def uninitialized(channels, filters, **settings):
    """A layer without random numbers, which fake tensors on a GPU cannot have."""
    with mock.patch.object(nn.Conv2d, "reset_parameters"):
        return dcnet.DecoupledConv2d(channels, filters, 3, padding=1, **settings)


def on_a_fake_gpu(change=lambda block: None, x=(2, 3, 6, 6), **given):
    """Whether the kernels take a block on a modern GPU after a change of its modules; tensors are fake."""
    with FakeTensorMode(), mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), torch.device("cuda"):
        block = Modules(uninitialized(3, FILTERS), nn.BatchNorm2d(FILTERS), nn.ReLU())
        change(block)
        tensors = {name: None if size is None else torch.empty(size) for name, size in given.items()}
        modules = (block.layer, block.norm, block.activation)
        return kernels.fits_block(torch.empty(x), tensors.get("squares"), *modules, tensors.get("residual"))


def without_count(block):
    block.norm.num_batches_tracked = None


def strided(block):
    block.norm.weight = nn.Parameter(torch.empty_strided((FILTERS,), (2,)))


def doubled_norm(block):
    block.norm = nn.BatchNorm2d(FILTERS, dtype=torch.float64)


def without_scale(block):
    block.norm.weight = None


def without_shift(block):
    block.norm.bias = None


def momentum_as_tensor(block):
    block.norm.momentum = torch.empty(())


def sloped(block):
    block.activation = nn.PReLU()


def without_filters_alone(block):
    block.layer = uninitialized(3, FILTERS, operator="linear-relucos")


def wide(block):
    block.layer, block.norm = uninitialized(3, 9 * 512), None


def grouped(block):
    block.layer = uninitialized(6, FILTERS + 1, groups=2)
    block.norm = None


@pytest.mark.parametrize("given", [{}, {"residual": (2, FILTERS, 6, 6)}, {"squares": (2, 6, 6)}], ids=str)
def test_blocks_that_fit(given):
    assert on_a_fake_gpu(**given)


def test_operators_of_filters_alone_fit():
    assert on_a_fake_gpu(lambda block: setattr(block, "layer", uninitialized(3, FILTERS, operator="linear-cos")))


def test_parts_are_optional():
    assert on_a_fake_gpu(sloped)
    assert on_a_fake_gpu(lambda block: setattr(block, "norm", None))


UNFIT = [
    without_count,
    without_scale,
    without_shift,
    momentum_as_tensor,
    strided,
    doubled_norm,
    without_filters_alone,
    wide,
]


@pytest.mark.parametrize("change", UNFIT)
def test_modules_that_do_not_fit(change):
    assert not on_a_fake_gpu(change)


def test_tensors_that_do_not_fit():
    assert not on_a_fake_gpu(grouped, x=(2, 6, 6, 6))
    assert not on_a_fake_gpu(residual=(2, FILTERS, 1, 1))
    assert not on_a_fake_gpu(sloped, residual=(2, FILTERS, 6, 6))
    assert not on_a_fake_gpu(squares=(2, 6, 5))
    # torch raises an error for statistics of a single value.
    assert not on_a_fake_gpu(x=(1, 3, 1, 1))
    assert on_a_fake_gpu(lambda block: block.eval(), x=(1, 3, 1, 1))


def test_a_missing_count_does_not_matter_in_evaluation():
    assert on_a_fake_gpu(lambda block: (without_count(block), block.eval()))


FAMILIES = ["sphere-cos", "ball-cos", "tanh-cos", "linear-sqcos", "seg-cos", "log-linear", "mix-sigmoid", "sharp-sqcos"]


class SmallNetwork(nn.Module):
    """Two blocks of a residual network and a classifier, fused or module by module."""

    def __init__(self, operator, fused):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = make_block(operator, channels=1), make_block(operator, channels=FILTERS)
        self.classifier, self.fused = nn.Linear(FILTERS, 10).to(DEVICE), fused

    def forward(self, x):
        if self.fused:
            modules = (self.second.layer, self.second.norm, self.second.activation)
            y, squares, again = kernels.block(x, None, self.first.layer, self.first.norm, nn.ReLU(), None, True)
            y = kernels.block(y, squares, *modules, again, False)[0]
        else:
            y = self.first(x)[0]
            y = self.second(y, y)[0]
        return self.classifier(y.mean((2, 3)))


def train(operator, fused, steps=5):
    """The losses of a training run on digits, and the trained network."""
    digits = load_digits()
    # Every second pixel, since the interpreter is slow.
    images, labels = torch.tensor(digits.images[:32, None, ::2, ::2] / 16).float(), torch.tensor(digits.target[:32])
    network, losses = SmallNetwork(operator, fused), []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        part = slice(8 * (step % 4), 8 * (step % 4) + 8)
        loss = nn.functional.cross_entropy(network(images[part].to(DEVICE)), labels[part].to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network


@pytest.mark.slow
@pytest.mark.parametrize("operator", FAMILIES)
def test_training_ends_where_the_modules_do(operator):
    (found, fused), (wanted, modules) = train(operator, True), train(operator, False)
    assert found == pytest.approx(wanted, rel=2e-3)
    # The fifth batch is the first one again.
    assert found[4] < found[0]
    for one, other in zip(fused.buffers(), modules.buffers(), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)
