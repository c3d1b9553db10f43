"""Rows of norm 1 by one kernel, and their gradients by another, compared with torch in float64."""

import pytest
import torch
from helpers.kernel_comparison import DEVICE, ON_GPU, TOLERANCE, assert_close, images, new_memory_is_nan, quiet_numpy
from torch.autograd.graph import saved_tensors_hooks

from dcnet.kernels import unit_rows as module
from dcnet.kernels.launch import Launch
from dcnet.kernels.unit_rows import rows_of, unit_rows

pytestmark = quiet_numpy

EPS = 1e-4


def formula(x, eps=EPS):
    return x / (x.square().sum(-1, keepdim=True) + eps).clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def run(function, x, views, cotangents):
    """Results and the gradient of the tensor that the inputs are views of."""
    units = function([view(x) for view in views])
    cotangents = [each.to(unit.dtype) for each, unit in zip(cotangents, units, strict=True)]
    (gradient,) = torch.autograd.grad(units, x, cotangents)
    return {"gradient": gradient, **{f"unit {i}": unit.detach() for i, unit in enumerate(units)}}


def compare(x, views=(lambda x: x,), *, eps=EPS, result=None, in_order=False, tolerance=None, cotangents=None):
    """Results and gradients of one or two views of a tensor."""
    result, x = x.dtype if result is None else result, x.detach().requires_grad_()
    cotangents = [images(*view(x).shape, dtype=result) for view in views] if cotangents is None else cotangents
    double = x.detach().double().requires_grad_()
    wanted = run(lambda given: [formula(each, eps) for each in given], double, views, cotangents)
    with new_memory_is_nan():
        found = run(lambda given: unit_rows(given, eps, result, in_order), x, views, cotangents)
    assert all(found[name].dtype == result for name in found if name != "gradient")
    assert found["gradient"].dtype == x.dtype
    assert_close(found, wanted, TOLERANCE[result] if tolerance is None else tolerance)


def queries_and_keys(heads=3, samples=2, length=5, features=8, dtype=torch.float32):
    """The output of a joint projection, and its queries and keys [samples, heads, length, features]."""
    x = images(samples, length, 3, heads, features, dtype=dtype)
    return x, (lambda x: x[:, :, 0].transpose(1, 2), lambda x: x[:, :, 1].transpose(1, 2))


# --- values and gradients ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [1, 16, 17, 63, 64, 100, 384, 1025])
def test_odd_sizes(features, dtype):
    """Several rows per program, and less than a tile of them at the end."""
    compare(images(37, features, dtype=dtype))


def test_widest_rows():
    compare(images(3, module.MOST_FEATURES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [17, 64, 384])
def test_queries_and_keys_in_one_launch(features, dtype):
    compare(*queries_and_keys(features=features, dtype=dtype))


def test_results_of_another_dtype():
    """As under autocast."""
    compare(images(5, 24), result=torch.bfloat16)
    compare(images(5, 24, dtype=torch.bfloat16), result=torch.float32, tolerance=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("eps", [0.0, EPS])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-10, 1e-3, 1e6, 1e15])
def test_extreme_norms(scale, eps):
    compare(scale * images(4, 24), eps=eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3, 1e4])
def test_extreme_norms_in_half_precision(scale, dtype):
    """Squares and their sum exceed the range of float16."""
    compare((scale * images(4, 96)).to(dtype))


def test_rows_of_different_norms():
    compare(images(5, 7) * torch.tensor([0.0, 1e-3, 1.0, 1e4, 1e9], device=DEVICE)[:, None])


def test_one_infinite_element_makes_its_row_nan_only():
    x = images(3, 8)
    x[1, 2] = torch.inf
    (unit,) = unit_rows([x], EPS, torch.float32)
    assert unit[1, 2].isnan()
    assert unit[[0, 2]].isfinite().all()


# --- layouts ---


VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "every second row": lambda x: x[:, ::2],
    "a part of every row": lambda x: x[..., :5],
    "not adjacent": lambda x: x[..., ::2],
    "features first": lambda x: x.transpose(-1, -2),
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "three strides": lambda x: x[::2, 1:3, ::2],
    "one row": lambda x: x[1, 2, 3],
    "permuted": lambda x: x.permute(2, 0, 1, 3),
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_with_strides(view, in_order):
    compare(images(3, 4, 5, 6), (VIEWS[view],), in_order=in_order)


def expanded(shape):
    return images(*[1] * len(shape)).expand(shape)


def permuted(shape):
    return images(*reversed(shape)).permute(*reversed(range(len(shape))))


@pytest.mark.parametrize("make", [expanded, permuted, lambda shape: images(*shape[:-1], 2 * shape[-1])[..., ::2]])
def test_gradients_with_strides(make):
    x, views = queries_and_keys()
    compare(x, views, cotangents=[make(view(x).shape) for view in views])


def test_results_lie_as_the_inputs():
    """Attention needs no copy, and linear layers get contiguous rows."""
    x, views = queries_and_keys()
    for unit in unit_rows([view(x) for view in views], EPS, x.dtype):
        assert unit.transpose(1, 2).is_contiguous()
    (unit,) = unit_rows([views[0](x)], EPS, x.dtype, in_order=True)
    assert unit.is_contiguous()


def test_rows_that_two_strides_describe():
    assert rows_of((2, 3, 5, 8), (360, 8, 72, 1))[2:] == (30, 3, 72, 8)
    assert rows_of((2, 3, 5, 8), (120, 40, 8, 1))[2:] == (30, 30, 0, 8)
    assert rows_of((2, 3, 5, 8), (1000, 100, 8, 1)) is None
    assert rows_of((2, 8), (8, 2)) is None


def test_queries_and_keys_of_other_heads_and_lengths():
    x = images(2, 40, 12)
    compare(x, (lambda x: x[:, :30].view(2, 3, 10, 12), lambda x: x[:, 30:37].view(2, 1, 7, 12)))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_empty_inputs(shape):
    x = images(*shape).requires_grad_()
    (unit,) = unit_rows([x], EPS, x.dtype)
    assert unit.shape == shape
    assert torch.autograd.grad(unit.sum(), x)[0].shape == shape


def test_one_empty_input_of_two():
    compare(images(4, 8), (lambda x: x[:0], lambda x: x))
    compare(images(4, 8), (lambda x: x, lambda x: x[:0]))


# --- autograd ---


def launched(monkeypatch):
    """The names of all kernels from now on."""
    names, call = [], Launch.__call__

    def note(self, *given, **options):
        names.append(self.kernel.fn.__name__)
        call(self, *given, **options)

    monkeypatch.setattr(Launch, "__call__", note)
    return names


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_are_written_in_the_dtype_of_the_input(dtypes, monkeypatch):
    """Autograd would cast others in a pass of its own."""
    seen = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *given, **_: seen.append([each.dtype for each in given]))
    x = images(3, 8, dtype=dtypes[0]).requires_grad_()
    unit_rows([x], EPS, dtypes[1])[0].sum().backward()
    first, last = dtypes
    assert seen == [[first, first, last, last, torch.float32], [last, last, last, last, torch.float32, first, first]]


def test_one_launch_each(monkeypatch):
    names, (x, views) = launched(monkeypatch), queries_and_keys()
    compare(x, views)
    assert names == ["unit_rows_kernel", "unit_rows_gradient_kernel"]


@pytest.mark.parametrize("learning", [0, 1])
def test_one_input_without_a_gradient(learning, monkeypatch):
    names = launched(monkeypatch)
    given = [images(4, 8), images(4, 8)]
    given[learning].requires_grad_()
    units = unit_rows(given, EPS, torch.float32)
    assert [unit.requires_grad for unit in units] == [learning == 0, learning == 1]
    (found,) = torch.autograd.grad(sum(unit.sum() for unit in units), given[learning])
    double = given[learning].detach().double().requires_grad_()
    torch.testing.assert_close(found.double(), torch.autograd.grad(formula(double).sum(), double)[0])
    assert names.count("unit_rows_gradient_kernel") == 1


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_without_a_gradient(used):
    x, views = queries_and_keys()
    given = [view(x).detach().requires_grad_() for view in views]
    found = torch.autograd.grad(unit_rows(given, EPS, torch.float32)[used].square()[..., 0].sum(), given[used])[0]
    double = given[used].detach().double().requires_grad_()
    wanted = torch.autograd.grad(formula(double).square()[..., 0].sum(), double)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


def test_no_gradient_is_recorded_without_need():
    x, views = queries_and_keys()
    assert not any(unit.requires_grad for unit in unit_rows([view(x) for view in views], EPS, x.dtype))
    with torch.no_grad():
        assert not unit_rows([x.requires_grad_()], EPS, x.dtype)[0].requires_grad


def again(function, x, views, weights):
    """Gradients of gradients, by the input and by the cotangents."""
    x, weights = x.requires_grad_(), [weight.requires_grad_() for weight in weights]
    units = function([view(x) for view in views])
    (first,) = torch.autograd.grad(units, x, weights, create_graph=True)
    found = torch.autograd.grad(first.pow(3).sum(), [x, *weights], create_graph=True)
    (third,) = torch.autograd.grad(found[0].square().sum(), x)
    return {str(i): each.detach() for i, each in enumerate((first, *found, third))}


def test_further_derivatives():
    """The second and the third, although the input is not saved."""
    x, views = queries_and_keys()
    weights = [images(*view(x).shape) for view in views]
    wanted = again(lambda given: [formula(each) for each in given], x.double(), views, [w.double() for w in weights])
    found = again(lambda given: unit_rows(given, EPS, torch.float32), x, views, weights)
    assert_close(found, wanted, 20 * TOLERANCE[torch.float32])


def test_batched_gradients():
    x, views = queries_and_keys()
    x.requires_grad_()
    units = unit_rows([view(x) for view in views], EPS, torch.float32)
    cotangents = [images(3, *unit.shape) for unit in units]
    wanted = torch.stack(
        [torch.autograd.grad(units, x, [each[i] for each in cotangents], retain_graph=True)[0] for i in range(3)]
    )
    (found,) = torch.autograd.grad(units, x, cotangents, is_grads_batched=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_input_may_be_overwritten():
    """Only the results are saved."""
    x = images(4, 8).requires_grad_()
    y = x * 1
    (unit,) = unit_rows([y], EPS, torch.float32)
    y.data.zero_()
    (found,) = torch.autograd.grad(unit[:, 0].sum(), x)
    double = x.detach().double().requires_grad_()
    torch.testing.assert_close(found.double(), torch.autograd.grad(formula(double)[:, 0].sum(), double)[0])


def test_overwritten_results_raise():
    x = images(4, 8).requires_grad_()
    (unit,) = unit_rows([x], EPS, torch.float32)
    with torch.no_grad():
        unit.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unit.sum().backward()


def test_saved_tensors_in_another_layout():
    x, views = queries_and_keys()
    with saved_tensors_hooks(lambda saved: saved.contiguous().clone(), lambda saved: saved):
        compare(x, views)


def test_results_are_the_same_bits():
    x, views = queries_and_keys(dtype=torch.bfloat16)
    first, second = (unit_rows([view(x) for view in views], EPS, x.dtype) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("features", [64, 72, 128])
def test_queries_and_keys_of_real_size(features):
    compare(*queries_and_keys(6, 64, 197, features, torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("features", [384, 1000, 1536, 8192])
def test_rows_of_real_size(features):
    compare(images(5043, features, dtype=torch.bfloat16))
