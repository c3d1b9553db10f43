"""Attention whose queries and keys are normalized by the kernel of unit rows."""

from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers.kernel_comparison import DEVICE, HALVES, ON_GPU, TOLERANCE, images, quiet_numpy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet.attention
from dcnet.functional import decoupled_attention
from dcnet.kernels import attention_rows, unit_rows, use_kernels
from dcnet.kernels.attention_rows import unit_vectors
from dcnet.kernels.launch import Launch

pytestmark = quiet_numpy

PER_HEAD = "sphere(scale=Learnable(per_channel=True))-cos"
EPS = 1e-4


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    """Without a GPU, tensors of the CPU pretend to be on one."""
    if not ON_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names, call = [], Launch.__call__

    def note(self, *given, **options):
        names.append(self.kernel.fn.__name__)
        call(self, *given, **options)

    monkeypatch.setattr(Launch, "__call__", note)
    return names


def projected(dtype=torch.float32, heads=3, length=5, features=16):
    """The output of a joint projection of queries, keys and values, which are views of it."""
    return images(2, length, 3, heads, features, dtype=dtype).requires_grad_()


def attend(x, operator, **settings):
    return decoupled_attention(*(x[:, :, i].transpose(1, 2) for i in range(3)), operator=operator, eps=EPS, **settings)


def by_torch(x, operator, **settings):
    with use_kernels(False):
        return attend(x, operator, **settings)


def compare(x, operator, tolerance=None, **settings):
    """Output and gradient, compared with float64."""
    tolerance = TOLERANCE[x.dtype] if tolerance is None else tolerance
    double = x.detach().double().requires_grad_()
    wanted = by_torch(double, operator, **settings)
    cotangent = torch.randn_like(wanted)
    found = attend(x, operator, **settings)
    gradients = torch.autograd.grad(found, x, cotangent.to(x.dtype)) + torch.autograd.grad(wanted, double, cotangent)
    for one, other in ((found, wanted), gradients):
        assert (one - other).norm() <= tolerance * other.norm()


# --- attention ---


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("operator", ["sphere-cos", "sphere(scale=3.0)-cos"])
def test_queries_and_keys_are_normalized_in_one_launch(operator, dtype, launched):
    compare(projected(dtype), operator, scale=4.0)
    assert launched == ["unit_rows_kernel", "unit_rows_gradient_kernel"]


@pytest.mark.parametrize("operator", ["sphere-cos+linear", "sphere-cos+product", "tanh(radius=2.0)-cos", "log-cos"])
def test_one_of_them_is_normalized(operator, launched):
    compare(projected(), operator)
    assert launched == ["unit_rows_kernel", "unit_rows_gradient_kernel"]


@pytest.mark.parametrize("attention", [attend, by_torch])
def test_a_fixed_scale_multiplies_the_scores(attention):
    x = projected()
    wanted = attention(x, "sphere-cos", scale=6.0)
    torch.testing.assert_close(attention(x, "sphere(scale=3.0)-cos", scale=2.0), wanted)


def test_a_scale_per_head():
    x, scale = projected(), torch.tensor([0.5, 1.0, 2.0], device=DEVICE, requires_grad=True)
    found = attend(x, PER_HEAD, constants={"scale": scale})
    wanted = by_torch(x, PER_HEAD, constants={"scale": scale})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(each.square().sum(), [x, scale]) for each in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_other_settings():
    compare(projected(), "sphere-cos", is_causal=True)
    x = images(2, 6, 5, 16)
    query, key, value = x, x[:, 2:4, :3], x[:, 4:, :3]
    found = decoupled_attention(query, key, value, enable_gqa=True, operator="sphere-cos")
    with use_kernels(False):
        wanted = decoupled_attention(query, key, value, enable_gqa=True, operator="sphere-cos")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_attention_takes_the_results_without_a_copy():
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as fused:
        attend(projected(), "sphere-cos")
    query, key, value = fused.call_args.args[:3]
    assert query.stride()[1:] == key.stride()[1:] == (16, 48, 1)
    assert value.stride()[1:] == (16, 144, 1)


def test_eps_of_zero(launched):
    x = projected()
    found = decoupled_attention(*x.unbind(2), operator="sphere-cos", eps=0.0)
    assert launched == ["unit_rows_kernel"]
    with use_kernels(False):
        torch.testing.assert_close(found, decoupled_attention(*x.unbind(2), operator="sphere-cos", eps=0.0))


@pytest.mark.parametrize("operator", ["sphere-cos", PER_HEAD])
def test_second_derivatives(operator):
    x = projected()
    found, wanted = [], []
    for call, kept in ((attend, found), (by_torch, wanted)):
        # The fused attention of torch has no second derivative.
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(call(x, operator, scale=3.0).square().sum(), x, create_graph=True)
            kept += [first, *torch.autograd.grad(first.square().sum(), x)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# --- where torch's operations are needed ---


def test_turned_off():
    with use_kernels(False):
        assert unit_vectors([images(3, 8)], EPS) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: [images(3, 8).double()],
        lambda: [images(3, 8), images(3, 8).half()],
        lambda: [images(3, 8), images(3, 7)],
        lambda: [images(0, 8)],
        lambda: [images(3, 0)],
        lambda: [images(2, unit_rows.MOST_FEATURES + 1)],
        lambda: [images(3, 8).to_sparse()],
        lambda: [images(3, 8).as_subclass(type("Sub", (torch.Tensor,), {}))],
    ],
    ids=["float64", "two dtypes", "two sizes", "no rows", "no features", "wide rows", "sparse", "subclass"],
)
def test_what_falls_back_to_torch(make):
    assert unit_vectors([images(3, 8)], EPS) is not None
    assert unit_vectors(make(), EPS) is None


def test_old_gpu_falls_back_to_torch(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    assert unit_vectors([images(3, 8)], EPS) is None


class Mode(TorchDispatchMode):
    """Runs every operation as it is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_transforms_modes_and_traces_fall_back_to_torch():
    seen, x = [], images(2, 3, 8)

    def ask(x):
        seen.append(unit_vectors([x], EPS))
        return x.sum()

    torch.func.vmap(ask)(x)
    torch.func.grad(ask)(x)
    torch.func.jvp(ask, (x,), (x,))
    with forward_ad.dual_level():
        ask(x)
    with Mode():
        ask(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert seen == [None] * 6


def test_vmap_and_jvp_of_attention(launched):
    x = projected().detach()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        found = torch.func.vmap(lambda x: attend(x[None], "sphere-cos")[0])(x)
        again = found if ON_GPU else torch.func.jvp(lambda x: attend(x, "sphere-cos"), (x,), (x,))[0]
    assert launched == []
    for output in (found, again):
        torch.testing.assert_close(output, by_torch(x, "sphere-cos"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exported", [False, True])
def test_compiled_and_exported_attention_keeps_the_formula(exported, monkeypatch, launched):
    if not ON_GPU:
        # A compiler does not know attributes that a test adds.
        monkeypatch.delattr(torch.Tensor, "is_cuda")
    torch.compiler.reset()
    monkeypatch.setattr(attention_rows, "_fits", lambda x: True)
    module = dcnet.attention.DecoupledAttention(operator="sphere-cos", eps=EPS).to(DEVICE)
    x = projected().detach()
    given = tuple(x[:, :, i].transpose(1, 2) for i in range(3))
    if exported:
        found = torch.export.export(module, given).module()(*given)
    else:
        found = torch.compile(module, backend="aot_eager", fullgraph=True)(*given)
    assert launched == []
    torch.testing.assert_close(found, by_torch(x, "sphere-cos"), rtol=1e-4, atol=1e-5)


# --- on a GPU ---


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("operator", ["sphere-cos", "tanh(radius=2.0)-cos"])
def test_attention_of_real_size(operator):
    compare(projected(torch.bfloat16, 6, 197, 64), operator, 2 * TOLERANCE[torch.bfloat16])


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_autocast():
    x = projected(heads=6, length=64, features=64)
    with torch.autocast("cuda", torch.bfloat16):
        found = attend(x, "sphere-cos")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), by_torch(x, "sphere-cos"), rtol=3e-2, atol=3e-2)
