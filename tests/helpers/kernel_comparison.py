"""Decoupled convolutions in the fused kernels, compared with torch in float64."""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dcnet
from dcnet.kernels import dispatch
from helpers.operators import all_operators

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

# ||difference|| / ||expected||. In half precision filters, products and results are rounded, each to 2^-12 or 2^-9 at
# worst; Triton's interpreter truncates to bfloat16, which doubles the error.
TOLERANCE = {
    torch.float32: 3e-5 if ON_GPU else 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 1.5e-2 if ON_GPU else 3e-2,
}
HALVES = [torch.bfloat16, torch.float16]

# The interpreter computes in numpy, which warns about overflow, unlike a GPU.
quiet_numpy = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@functools.cache
def a_convolution():
    """Input and filters as fake tensors on a GPU."""
    with FakeTensorMode():
        return torch.empty(2, 3, 5, 5, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")


def takes_kernels(operator, x=None, w=None, bias=None, padding=1, groups=1):
    """Whether a layer on a modern GPU would use the kernels."""
    x, w = a_convolution()[0] if x is None else x, a_convolution()[1] if w is None else w
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        return dispatch.fits(x, w, bias, padding, groups, {"operator": operator})


@functools.cache
def fused_operators():
    """Every operator of the registries that the kernels support."""
    return [name for name in all_operators() if takes_kernels(name)]


def parts_of(operator):
    op = dcnet.Operator.parse(operator)
    return {f"h {op.magnitude.name}", f"g {op.angle.name}", f"weighting {op.weighting.name}"}


@functools.cache
def one_of_each():
    """A few operators that contain every magnitude, angle and weighting of `fused_operators`."""
    chosen, seen = [], set()
    while True:
        best = max(fused_operators(), key=lambda name: len(parts_of(name) - seen))
        if parts_of(best) <= seen:
            return chosen
        chosen.append(best)
        seen |= parts_of(best)


def alternating(operators, settings):
    """All operators with all settings as test parameters; all are slow, except one setting per operator, in turn."""
    return [
        pytest.param(operator, *setting, marks=[] if i % len(settings) == k else pytest.mark.slow)
        for i, operator in enumerate(operators)
        for k, setting in enumerate(settings)
    ]


def make_layer(operator, channels=3, filters=2, kernel=3, *, dtype=torch.float32, **settings):
    """A layer with different filters and constants, as after training."""
    layer = dcnet.DecoupledConv2d(channels, filters, kernel, operator=operator, **settings)
    with torch.no_grad():
        layer.weight.mul_(torch.empty(filters, 1, 1, 1).uniform_(0.5, 2))
        for name in layer.operator.learned:
            stored = layer.get_parameter(name)
            stored.mul_(torch.empty_like(stored).uniform_(0.7, 1.3))
    return layer.to(DEVICE, dtype)


def images(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def by_kernels(layer, x):
    """The layer in the fused kernels: called by the layer on a GPU, and directly in the interpreter."""
    if not ON_GPU:
        window = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return dispatch.conv2d(x, layer.weight, layer.bias, *window, layer.options())
    with mock.patch.object(dcnet.kernels, "conv2d", wraps=dcnet.kernels.conv2d) as taken:
        output = layer(x)
    taken.assert_called_once()
    return output


def by_torch(layer, x):
    return layer(x)


def by_kernels_and_in_place(layer, x):
    """An in-place activation that also changes values with a gradient, unlike ReLU alone."""
    return by_kernels(layer, x).mul_(-2).relu_()


def by_torch_and_activated(layer, x):
    return (-2 * layer(x)).relu()


def exact(layer):
    """The same layer in float64."""
    return copy.deepcopy(layer).double()


@contextlib.contextmanager
def new_memory_is_nan(fill=True):
    """Deterministic mode makes torch fill new memory."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def results(run, layer, x, cotangent):
    """Output, every requested gradient and the running mean, by name."""
    tensors = {"input": x, **dict(layer.named_parameters())}
    wanted = {name: value for name, value in tensors.items() if value.requires_grad}
    output = run(layer, x)
    gradients = torch.autograd.grad(output, list(wanted.values()), cotangent.to(output.dtype))
    return {"output": output.detach(), **dict(zip(wanted, gradients, strict=True)), **dict(layer.named_buffers())}


def expected(layer, x, cotangent, run=by_torch):
    """The results in float64 from the same numbers; call it before the layer updates its running mean."""
    double = x.detach().double().requires_grad_(x.requires_grad)
    return results(run, exact(layer), double, cotangent)


def cotangent_for(layer, x):
    with torch.no_grad():
        return torch.randn(exact(layer)(x.double()).shape).to(x)


def scales(layer, x, cotangent, run=by_torch):
    """The size of each result, also with other signs of the cotangent, since a sum may happen to cancel."""
    found = [expected(layer, x, cotangent, run)]
    found += [expected(layer, x, cotangent * torch.randn_like(cotangent).sign(), run) for _ in range(2)]
    return {name: max(result[name].double().norm().item() for result in found) for name in found[0]}


def assert_close(found, wanted, tolerance, scale=None):
    """||difference|| is less than the tolerance times the scale, or times ||wanted||."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        size = value.double().norm().item() if scale is None else scale[name]
        assert found[name].shape == value.shape, name
        assert (found[name].double() - value).norm() <= tolerance * size, name


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def check(layer, x, cotangent=None, run=by_kernels, run_exactly=by_torch, needs_input=True):
    """Checks that the kernels give the output, gradients and running mean of the layer in float64."""
    x.requires_grad_(needs_input)
    cotangent = cotangent_for(layer, x) if cotangent is None else cotangent
    wanted, scale = expected(layer, x, cotangent, run_exactly), scales(layer, x, cotangent, run_exactly)
    found = results(run, layer, x, cotangent)
    assert_close(found, wanted, TOLERANCE[x.dtype], scale)
    assert found["output"].dtype == x.dtype
