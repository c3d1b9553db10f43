"""Passes on a CPU: results in parts are those of the whole, and tanh keeps its values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dcnet
from dcnet import cpu_passes
from dcnet.cpu_passes import in_parts, is_eager_on_cpu
from dcnet.magnitude import Tanh

TANH = Tanh()


def tanh(x: Tensor) -> Tensor:
    return TANH.value(x, 1.0, 1.0)


def test_tanh_in_float32_is_precise():
    x = torch.cat([torch.logspace(-8, 3, 10_001), torch.tensor([0.0, torch.inf])])
    torch.testing.assert_close(tanh(x).double(), torch.tanh(x.double()), rtol=4e-7, atol=0)
    assert tanh(torch.tensor([torch.nan])).isnan()
    assert tanh(x).max() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tanh_in_other_precisions_is_that_of_torch(dtype):
    x = torch.linspace(0, 3, 101).to(dtype)
    assert torch.equal(tanh(x), torch.tanh(x))


def test_gradients_of_tanh():
    x = torch.linspace(0, 3, 101, requires_grad=True)
    (slope,) = torch.autograd.grad(tanh(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    y = torch.tanh(x.detach().double())
    torch.testing.assert_close(slope.detach().double(), 1 - y**2, rtol=0, atol=1e-6)
    torch.testing.assert_close(second.double(), -2 * y * (1 - y**2), rtol=0, atol=2e-6)


TRANSFORMS = {
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "jacfwd": lambda run, x: torch.func.jacfwd(run)(x),
    "trace": lambda run, x: torch.jit.trace(run, x, check_trace=False)(x),
    "compile": lambda run, x: torch.compile(run, backend="eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_the_operation_of_torch(name):
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(is_eager_on_cpu(x))
        return tanh(x)

    assert TRANSFORMS[name](run, torch.linspace(0, 1, 4)) is not None
    assert seen
    assert not any(seen)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the parts; one has 12 numbers."""
    monkeypatch.setattr(cpu_passes, "PART", 12)
    return []


def double(parts: list[Tensor], product: Tensor, n: Tensor) -> Tensor:
    parts.append(product)
    return product * 2 + n


@pytest.mark.parametrize(("shape", "dims", "count"), [((7, 4), 1, 3), ((2, 3, 4), 2, 2), ((3, 20), 1, 3)])
def test_parts_are_those_of_the_whole(shape, dims, count, parts):
    product, n = torch.randn(shape), torch.randn(*shape[:dims], 1)
    expected, address = product * 2 + n, product.data_ptr()
    with torch.no_grad():
        found = in_parts(lambda *given: double(parts, *given), product, n, dims)
    assert torch.equal(found, expected)
    assert found.data_ptr() == address
    assert len(parts) == count


def test_a_product_with_gaps_in_memory(parts):
    product, n = torch.randn(6, 4, 8)[..., ::2].transpose(0, 1), torch.randn(4, 6, 1)
    expected = product * 2 + n
    with torch.no_grad():
        assert torch.equal(in_parts(lambda *given: double(parts, *given), product, n, 2), expected)
    assert len(parts) > 1


def test_gradients_and_other_shapes_take_one_part(parts):
    product, n = torch.randn(8, 4, requires_grad=True), torch.randn(8, 1)
    assert in_parts(lambda *given: double(parts, *given), product, n, 1).requires_grad
    with torch.no_grad():
        in_parts(lambda *given: double(parts, *given), product, n[:1], 1)
    assert len(parts) == 2


LAYERS = {
    "channels last": (lambda operator: dcnet.conv2d(4, 6, 3, padding=1, operator=operator), (3, 4, 5, 5), True),
    "channels first": (lambda operator: dcnet.conv2d(4, 6, 3, operator=operator), (3, 4, 5, 5), False),
    "groups": (lambda operator: dcnet.conv2d(4, 6, 3, groups=2, operator=operator), (3, 4, 5, 5), True),
    "1-d": (lambda operator: dcnet.DecoupledConv1d(4, 6, 3, operator=operator), (3, 4, 9), False),
    "3-d": (lambda operator: dcnet.DecoupledConv3d(4, 6, 3, operator=operator), (2, 4, 4, 4, 4), False),
    "one image": (lambda operator: dcnet.conv2d(4, 6, 3, operator=operator), (4, 6, 6), False),
    "rows": (lambda operator: dcnet.DecoupledLinear(4, 6, operator=operator), (2, 5, 4), False),
    "one row": (lambda operator: dcnet.DecoupledLinear(4, 60, operator=operator), (4,), False),
}


@pytest.mark.parametrize(
    "operator", ["tanh-cos", "seg-sqcos", "sphere-linear", "tanh(radius=2.0)-cos", "log-cos+joint"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_folded_layers_in_parts(name, operator, monkeypatch):
    make, shape, last = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(operator), torch.randn(shape)
    if last:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    layer(x)
    folded = dcnet.fold(layer)
    with torch.no_grad():
        expected = folded(x)
        monkeypatch.setattr(cpu_passes, "PART", 7)
        found = folded(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, layer.eval()(x).detach())


def relative_to_all(n: Tensor) -> Tensor:
    """A magnitude that combines patches."""
    return torch.tanh(n / n.mean())


def test_custom_functions_see_all_patches(monkeypatch):
    monkeypatch.setattr(cpu_passes, "PART", 7)
    layer, x = dcnet.conv2d(3, 8, 3, operator=dcnet.Operator(relative_to_all, "sqcos")), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(dcnet.fold(layer)(x), layer(x))


def test_folded_layers_do_not_change_tensors_of_custom_functions():
    kept = {}

    def angle(cos: Tensor) -> Tensor:
        kept["returned"] = cos * 2
        kept["copy"] = kept["returned"].clone()
        return kept["returned"]

    layer = dcnet.conv2d(3, 8, 3, operator=dcnet.Operator("sphere", angle))
    with torch.no_grad():
        dcnet.fold(layer)(torch.randn(2, 3, 6, 6))
    assert torch.equal(kept["returned"], kept["copy"])


def test_recomputation_may_run_under_another_mode():
    layer, x = dcnet.conv2d(3, 8, 3, operator="tanh-cos"), torch.randn(2, 3, 6, 6, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    with FlopCounterMode(display=False):
        y.sum().backward()
    assert x.grad is not None
