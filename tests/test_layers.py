"""Decoupled layers as modules: state, casts, compilation, export, and corner cases."""

import copy
import io
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dcnet
from dcnet import kernels

# --- compilation, export, state, and memory layout ---


OPERATORS = [
    "tanh-cos",
    "linear-cos+linear",
    "seg(learnable=True)-sigmoid(learnable=True)+product",
    "mix-spline+joint",
    "ball&log-linear+linear",
]


def conv(operator, **options):
    return dcnet.DecoupledConv2d(4, 6, 3, padding=1, operator=operator, **options)


EVERY_PART_ONCE = [
    *(f"{magnitude}-cos" for magnitude in dcnet.magnitude.registry),
    *(f"tanh-{angle}" for angle in dcnet.angle.registry),
    *(f"seg-sqcos+{weighting}" for weighting in dcnet.weighting.registry if weighting != "unweighted"),
    *OPERATORS,
]


@pytest.mark.parametrize("operator", sorted(set(EVERY_PART_ONCE)))
def test_compiles_without_graph_breaks(operator):
    torch.compiler.reset()
    layer = conv(operator)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 5, 5)
    gradients = []
    for call in (layer, compiled):
        point = x.clone().requires_grad_()
        call(point).square().sum().backward()
        gradients.append([point.grad, *(value.grad for value in call.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(layer.state_dict(), dict(compiled._orig_mod.state_dict()))


@pytest.mark.parametrize("operator", [OPERATORS[0], pytest.param(OPERATORS[2], marks=pytest.mark.slow)])
def test_compiles_with_inductor(operator, device):
    torch.compiler.reset()
    layer = conv(operator).to(device)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x = torch.randn(2, 4, 5, 5, device=device)
    results = []
    for call in (layer, compiled):
        point = x.clone().requires_grad_()
        y = call(point)
        y.square().sum().backward()
        results.append([y, point.grad, *(value.grad for value in call.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_exports_with_a_dynamic_batch(operator, training):
    layer = conv(operator).train(training)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(layer, (torch.randn(3, 4, 5, 5),), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 4, 5, 5)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("operator", OPERATORS)
def test_copies_pickles_and_saves(operator):
    layer = conv(operator)
    layer(torch.randn(2, 4, 5, 5))
    layer.eval()
    x = torch.randn(2, 4, 5, 5)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    loaded = conv(operator).eval()
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), layer(x))
        assert other.operator == layer.operator


def test_plain_checkpoint_loads_without_the_state_of_the_operator():
    plain = nn.Conv2d(4, 6, 3)
    layer = dcnet.DecoupledConv2d(4, 6, 3, operator="tanh-cos")
    report = layer.load_state_dict(plain.state_dict(), strict=False)
    assert report.missing_keys == ["radius", "mean_norm", "num_batches_tracked"]
    assert report.unexpected_keys == []
    assert torch.equal(layer.weight, plain.weight)
    assert isinstance(layer, nn.Conv2d)
    unlearned = dcnet.DecoupledConv2d(4, 6, 3, operator="linear-sqcos")
    unlearned.load_state_dict(plain.state_dict())


def test_state_is_flat_and_named_after_the_constants():
    layer = conv("tanh(learnable=True)&seg-sigmoid(learnable=True)")
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "weight": (6, 4, 3, 3),
        "bias": (6,),
        "scale_0": (1,),
        "radius_0": (6,),
        "radius_1": (6,),
        "k": (1,),
        "mean_norm": (),
        "num_batches_tracked": (),
    }


def test_positive_constants_are_stored_as_roots():
    layer = conv("tanh(radius=Radius(init=2.0))-sigmoid(k=0.3,learnable=True)", dtype=torch.float64)
    torch.testing.assert_close(layer.radius.detach(), torch.full((6,), (2 - 1e-4) ** 0.5, dtype=torch.float64))
    torch.testing.assert_close(layer.constants()["radius"].detach(), torch.full((6,), 2.0, dtype=torch.float64))
    assert layer.constants()["k"].item() == pytest.approx(0.3)
    with torch.no_grad():
        layer.k.fill_(-1e-9)
        layer.radius.zero_()
    assert layer.constants()["k"].item() > 0
    assert (layer.constants()["radius"] == 1e-4).all()
    assert layer(torch.randn(1, 4, 5, 5, dtype=torch.float64)).isfinite().all()


def test_layers_of_one_operator_share_no_state():
    op = dcnet.Operator.parse("tanh-sigmoid(learnable=True)")
    first, second = conv(op), conv(op)
    with torch.no_grad():
        first.radius.mul_(2)
        first.k.mul_(2)
    first(torch.randn(1, 4, 5, 5))
    fresh = conv(op)
    for name in ("radius", "k", "mean_norm"):
        assert torch.equal(second.state_dict()[name], fresh.state_dict()[name])


@pytest.mark.parametrize("operator", OPERATORS)
def test_functional_call_and_per_sample_gradients(operator):
    layer = conv(operator).eval()
    x = torch.randn(3, 4, 5, 5)
    values = dict(layer.named_parameters())

    def loss(values, sample):
        return torch.func.functional_call(layer, values, (sample[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
    for i in range(3):
        alone = torch.autograd.grad(layer(x[i : i + 1]).square().sum(), list(values.values()))
        for name, expected in zip(values, alone, strict=True):
            torch.testing.assert_close(per_sample[name][i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("operator", OPERATORS)
def test_channels_last_input_gives_channels_last_output(operator, groups, device):
    layer = dcnet.DecoupledConv2d(4, 6, 3, groups=groups, operator=operator, device=device)
    x = torch.randn(2, 4, 5, 5, device=device)
    expected = layer(x)
    y = layer.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_batches(operator):
    layer = conv(operator)
    x = torch.zeros(0, 4, 5, 5, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 6, 5, 5)
    y.sum().backward()
    for name, value in layer.named_parameters():
        assert value.grad is None or (value.grad == 0).all(), name
    assert dcnet.DecoupledLinear(4, 3, operator=operator)(torch.zeros(0, 4)).shape == (0, 3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_meta_device_and_reset(operator):
    layer = conv(operator, device="meta")
    assert layer(torch.zeros(2, 4, 5, 5, device="meta")).shape == (2, 6, 5, 5)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    fresh = conv(operator)
    for name, value in fresh.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name


def test_constants_can_be_parametrized_or_replicated():
    layer, x = conv("tanh-sigmoid(learnable=True)"), torch.randn(1, 4, 5, 5)
    expected = layer(x)
    replica = layer._replicate_for_data_parallel()
    for name, value in layer.named_parameters():
        setattr(replica, name, value * 1)  # as torch.nn.parallel.replicate does
    torch.testing.assert_close(replica(x), expected)

    class Doubled(nn.Module):
        def forward(self, value):
            return 2 * value

    nn.utils.parametrize.register_parametrization(layer, "radius", Doubled())
    assert not torch.allclose(layer(x), expected)


def test_running_mean_is_float32_with_a_half_precision_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert dcnet.DecoupledLinear(4, 3).mean_norm.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_operator_conv_builds_torchs_own_layer():
    for make, plain, decoupled in [
        (dcnet.conv1d, nn.Conv1d, dcnet.DecoupledConv1d),
        (dcnet.conv2d, nn.Conv2d, dcnet.DecoupledConv2d),
        (dcnet.conv3d, nn.Conv3d, dcnet.DecoupledConv3d),
    ]:
        assert type(make(3, 4, 3, operator="conv")) is plain
        assert type(make(3, 4, 3, operator="tanh-cos")) is decoupled
    assert type(dcnet.linear(3, 4, operator="conv", eps=1e-3)) is nn.Linear
    assert type(dcnet.linear(3, 4, operator="tanh-cos", eps=1e-3)) is dcnet.DecoupledLinear


def test_same_seed_gives_the_filters_of_the_plain_layer():
    torch.manual_seed(5)
    plain = nn.Conv2d(4, 6, 3)
    torch.manual_seed(5)
    layer = dcnet.DecoupledConv2d(4, 6, 3, operator="tanh-cos")
    assert torch.equal(plain.weight, layer.weight)
    assert torch.equal(plain.bias, layer.bias)


def test_repr_shows_the_operator():
    layer = dcnet.DecoupledConv2d(4, 6, 3, operator="seg(slope=0.2)-sqcos+linear")
    assert repr(layer) == (
        "DecoupledConv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), operator='seg(slope=0.2)-sqcos+linear')"
    )


def test_linear_cos_computes_no_patch_norm(monkeypatch):
    """Only the filters are scaled, before the inner product."""
    monkeypatch.setattr(dcnet.eager, "patch_norm", None)
    monkeypatch.setattr(dcnet.eager, "vector_norm", None)
    for operator in ("linear-cos", "linear-cos+linear", "linear(scale=2.0)&linear-cos", "linear-relucos+linear"):
        conv(operator)(torch.randn(1, 4, 5, 5))
        dcnet.DecoupledLinear(4, 3, operator=operator)(torch.randn(1, 4))


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of every elementwise function."""

    def __init__(self):
        super().__init__()
        self.transcendental = []
        self.tanh = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("tanh", "log1p", "sqrt", "reciprocal", "div"):
            self.transcendental.append((function.overloadpacket.__name__, args[0].numel()))
        if function.overloadpacket.__name__ == "tanh":
            self.tanh = result
        return result


@pytest.mark.parametrize(
    "operator", ["tanh(radius=2.0)-cos", "log-sqcos", "seg(radius=2.0)-cos+linear", "ball(radius=2.0)-cos"]
)
def test_functions_of_the_norm_are_computed_on_one_channel(operator):
    layer = dcnet.DecoupledConv2d(4, 64, 3, padding=1, operator=operator)
    with Recorded() as seen:
        layer(torch.randn(2, 4, 5, 5))
    assert seen.transcendental
    assert max(count for _, count in seen.transcendental) <= 64


@pytest.mark.parametrize("groups", [1, 2])
def test_intermediate_tensors_have_the_memory_layout_of_the_input(groups):
    """Operations between different layouts are several times slower."""
    layer = dcnet.DecoupledConv2d(4, 6, 3, groups=groups, operator="tanh-cos")
    for memory_format, side_by_side in ((torch.contiguous_format, False), (torch.channels_last, True)):
        with Recorded() as seen:
            layer(torch.randn(2, 4, 7, 9).to(memory_format=memory_format))
        assert seen.tanh.numel() == 2 * 6 * 5 * 7
        channels = list(seen.tanh.shape).index(6 // groups)
        assert seen.tanh.stride(channels) == (1 if side_by_side else 5 * 7)


def test_unknown_options_are_rejected():
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(6, 4, 3, 3)
    with pytest.raises(TypeError, match="unknown option 'epsilon': known are operator, eps, constants"):
        dcnet.functional.decoupled_conv2d(x, weight, operator="tanh-cos", epsilon=3.0)
    with pytest.raises(TypeError, match="operator is missing"):
        dcnet.functional.decoupled_conv2d(x, weight)
    with pytest.raises(ValueError, match="'tanh-cos' learns no constant 'radious': known are radius"):
        dcnet.functional.decoupled_conv2d(x, weight, operator="tanh-cos", constants={"radious": torch.ones(6)})


def test_invalid_input_is_rejected():
    layer = dcnet.DecoupledConv2d(4, 6, 3)
    with pytest.raises(ValueError, match=r"input of shape \[1, 3, 5, 5\] must have 4 channels"):
        layer(torch.zeros(1, 3, 5, 5))
    with pytest.raises(TypeError, match=r"floating-point tensor, not torch.int64"):
        layer(torch.zeros(1, 4, 5, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[5, 5\] must have 3 or 4 dimensions"):
        layer(torch.zeros(5, 5))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        dcnet.DecoupledConv2d(4, 6, 3, dilation=2)(torch.zeros(1, 4, 3, 3))
    with pytest.raises(ValueError, match=r"\[5, 5\] must have 4 channels"):
        dcnet.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect")(torch.zeros(5, 5))
    with pytest.raises(TypeError, match="floating-point"):
        dcnet.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect")(torch.zeros(1, 4, 5, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[2, 3\] must have 4 features"):
        dcnet.DecoupledLinear(4, 6)(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="eps must not be negative, not -1"):
        dcnet.DecoupledConv2d(4, 6, 3, eps=-1)
    with pytest.raises(ValueError, match=r"'conv' is torch's own layer"):
        dcnet.DecoupledConv2d(4, 6, 3, operator="conv")
    with pytest.raises(TypeError, match="not 3"):
        dcnet.DecoupledConv2d(4, 6, 3, operator=3)
    with pytest.raises(TypeError, match="pass operators by keyword, operator='tanh-cos'"):
        dcnet.DecoupledConv2d(4, 6, 3, "tanh-cos")
    with pytest.raises(TypeError, match=r"bias must be True or False, not 'sphere-sqcos': pass operators by keyword"):
        dcnet.DecoupledLinear(3, 4, "sphere-sqcos")


# --- edge cases ---


@pytest.mark.parametrize("magnitude", ["tanh", "ball"])
@pytest.mark.parametrize("rho", [0.002, 0.3, 1.0])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-18, 1.0])
def test_gradients_are_finite_without_eps(magnitude, rho, size):
    layer = dcnet.DecoupledConv2d(2, 3, 3, operator=f"{magnitude}(radius=Radius(init={rho}))-cos", eps=0)
    x = (size * torch.randn(1, 2, 4, 4)).requires_grad_()
    layer(x).sum().backward()
    assert layer.radius.grad.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "layer", [dcnet.DecoupledLinear(3, 4), dcnet.DecoupledConv1d(3, 4, 3), dcnet.DecoupledConv2d(3, 4, 3)]
)
@pytest.mark.parametrize("given", [None, [1.0], "x"])
def test_input_that_is_not_a_tensor_is_rejected(layer, given):
    with pytest.raises(TypeError, match="input must be a tensor, not"):
        layer(given)


@pytest.mark.parametrize("operator", ["tanh-cos", "seg(radius=Radius(relative=False))-spline", "ball&log-sqcos"])
def test_layers_work_on_a_device_that_is_not_the_default(operator):
    plain, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.device("meta"):  # stands for a GPU: mixing devices would fail
        layer = dcnet.decouple(plain, operator, start="calibrated", data=[x]).eval()
        folded, new = dcnet.fold(layer), dcnet.DecoupledConv2d(3, 4, 3, device="cpu", operator=operator)
        dcnet.functional.decoupled_conv2d(x, new.weight, operator=operator)
        new.reset_parameters()
        dcnet.testing.assert_decoupled(new)
    torch.testing.assert_close(folded(x), layer(x))


@pytest.mark.parametrize("eps", [-1e-3, float("nan")])
def test_functions_reject_an_invalid_eps(eps):
    with pytest.raises(ValueError, match="eps must not be negative, not"):
        dcnet.functional.decoupled_linear(torch.randn(2, 3), torch.randn(4, 3), operator="tanh-cos", eps=eps)


@pytest.mark.parametrize("eps", [1e-40, 1e-46, 1e-60])
@pytest.mark.parametrize("operator", ["tanh-cos", "sphere-cos", "linear-sqcos"])
def test_gradients_of_zeros_are_finite_with_an_eps_below_float32(operator, eps):
    x, weight = torch.zeros(1, 3, requires_grad=True), torch.randn(4, 3)
    dcnet.functional.decoupled_linear(x, weight, operator=operator, eps=eps).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("operator", ["tanh-cos", "linear-cos", "tanh-linear+product"])
@pytest.mark.parametrize("shape", [(1,), (3,), (4, 1), ()])
def test_bias_of_a_wrong_shape_is_rejected(operator, shape):
    x, weight, bias = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.ones(shape)
    with pytest.raises(ValueError, match=re.escape(f"bias of shape {list(shape)} must have the shape [4]")):
        dcnet.functional.decoupled_conv2d(x, weight, bias, operator=operator)


@pytest.mark.parametrize("shape", [(4,), (1,), ()])
def test_bias_of_a_linear_layer_broadcasts_as_in_torch(shape):
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(shape)
    without = dcnet.functional.decoupled_linear(x, weight, operator="tanh-cos")
    found = dcnet.functional.decoupled_linear(x, weight, bias, operator="tanh-cos")
    torch.testing.assert_close(found, without + bias)


@pytest.mark.parametrize(("channels", "groups"), [(3, 3), (0, 0), (2, -2)])
def test_invalid_groups_are_rejected(channels, groups):
    x, weight = torch.randn(2, channels, 5, 5), torch.randn(4, 1, 3, 3)
    with pytest.raises(ValueError, match=f"groups must divide the number of filters, 4, not {groups}"):
        dcnet.functional.decoupled_conv2d(x, weight, groups=groups, operator="tanh-cos")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"contants": {}}, "unknown option 'contants'"),
        ({"constants": {"raduis": torch.ones(4)}}, "learns no constant 'raduis'"),
        ({"eps": -1.0}, "eps must not be negative"),
    ],
)
def test_kernels_reject_the_options_that_eager_rejects(monkeypatch, options, problem):
    monkeypatch.setattr(kernels, "fits", lambda *_: True)
    with pytest.raises((TypeError, ValueError), match=problem):
        dcnet.functional.decoupled_conv2d(
            torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), operator="tanh-cos", **options
        )


@pytest.mark.parametrize("operator", ["tanh-cos", "linear-relucos+product"])
def test_linear_layer_without_outputs(operator):
    layer = dcnet.DecoupledLinear(3, 2, operator=operator)
    weight, bias = layer.weight[:0], layer.bias[:0]
    assert dcnet.functional.decoupled_linear(torch.randn(5, 3), weight, bias, operator=operator).shape == (5, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)  # torch warns that there is nothing to initialize
        assert dcnet.DecoupledLinear(3, 0, operator=operator)(torch.randn(5, 3)).shape == (5, 0)


def test_sizes_can_be_numpy_integers():
    x, weight, two = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3), np.int64(2)
    found = dcnet.functional.decoupled_conv2d(x, weight, None, two, two, two, operator="tanh-cos")
    assert torch.equal(found, dcnet.functional.decoupled_conv2d(x, weight, None, 2, 2, 2, operator="tanh-cos"))
    assert kernels.dispatch.sizes(weight, two, two, two) == ((2, 2), (2, 2), (2, 2))
