"""Linear layers of the angle alone: products of unit rows and unit filters, compared with torch in float64."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_comparison import (
    DEVICE,
    HALVES,
    ON_GPU,
    TOLERANCE,
    assert_close,
    by_torch,
    check,
    cotangent_for,
    exact,
    images,
    quiet_numpy,
)

import dcnet
from dcnet import Operator
from dcnet.kernels import convolution, dispatch, known_calls, unit_product, use_kernels
from dcnet.kernels.launch import Launch
from dcnet.kernels.unit_product import is_cosine, multiply_units

pytestmark = quiet_numpy

LEARNED = ["sphere(learnable=True)-cos", "sphere(scale=Learnable(init=1.3,per_channel=True))-cos"]
FIXED = ["sphere-cos", "sphere(scale=2.5)-cos"]
COSINES = [spec + weighting for spec in (*FIXED, *LEARNED) for weighting in ("", "+linear", "+joint", "+product")]


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    """Layers of all shapes use unit rows, and without a GPU, tensors of the CPU pretend to be on one."""
    monkeypatch.setattr(dispatch, "pays", lambda w: True)
    for module, name in ((convolution, "_compiled"), (known_calls, "_known"), (unit_product, "_known")):
        monkeypatch.setattr(module, name, {})
    if not ON_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))


@contextlib.contextmanager
def launches():
    """The names of the kernels that are launched."""
    names, call = [], Launch.__call__

    def note(self, *given, **options):
        names.append(self.kernel.fn.__name__)
        call(self, *given, **options)

    with mock.patch.object(Launch, "__call__", note):
        yield names


def make_linear(operator, inputs=7, outputs=5, *, dtype=torch.float32, **settings):
    """A layer with different filters and scales, as after training."""
    layer = dcnet.DecoupledLinear(inputs, outputs, operator=operator, **settings)
    with torch.no_grad():
        layer.weight.mul_(torch.empty(outputs, 1).uniform_(0.5, 2))
        for stored in layer.learned().values():
            stored.mul_(torch.empty_like(stored).uniform_(0.7, 1.3))
    return layer.to(DEVICE, dtype)


def by_units(layer, x):
    """The layer, which must normalize its rows by the kernel and leave the rest to torch."""
    with launches() as names:
        output = layer(x)
    assert names[0] == "unit_rows_kernel"
    assert set(names[1:]) <= {"unit_kernel"}
    return output


def exactly(layer, x):
    with use_kernels(False):
        return layer(x)


def compare(layer, x):
    """Twice: the second call finds the checks of the first one."""
    for _ in range(2):
        check(layer, x.detach(), run=by_units, run_exactly=exactly)
    assert len(unit_product._known) == 1


# --- which operators ---


@pytest.mark.parametrize("operator", COSINES)
def test_operators_of_the_angle_alone(operator):
    assert is_cosine(Operator.parse(operator))


@pytest.mark.parametrize("operator", ["tanh-cos", "linear-cos", "sphere-sqcos", "sphere&sphere-cos"])
def test_other_operators(operator):
    assert not is_cosine(Operator.parse(operator))


@pytest.mark.parametrize(("filters", "eager", "compiled"), [(7, True, True), (6, False, True), (5, False, False)])
def test_unit_rows_are_for_layers_with_many_filters(filters, eager, compiled):
    w = torch.empty(filters, 6)
    assert unit_product.pays(w) == eager
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        assert unit_product.pays(w) == compiled


def test_layers_with_few_filters_have_passes_over_the_output(monkeypatch):
    monkeypatch.setattr(dispatch, "pays", unit_product.pays)
    for inputs, outputs in ((7, 5), (5, 7)):
        layer, x = make_linear("sphere-cos", inputs, outputs), images(3, inputs)
        with launches() as names:
            output = layer(x)
        torch.testing.assert_close(output, exactly(layer, x), rtol=1e-4, atol=1e-5)
        assert (names[0] == "unit_rows_kernel") == (outputs > inputs)


def test_custom_weightings_are_not_supported():
    class Root(dcnet.weighting.Weighting):
        name, equation = "root", "sqrt(||w||) {x}"

        def factor(self, w_norm, h, scale):
            return w_norm.sqrt()

    assert not is_cosine(Operator("sphere", "cos", Root()))


# --- values and gradients ---


@pytest.mark.parametrize("operator", COSINES)
def test_every_operator(operator):
    compare(make_linear(operator), images(2, 3, 7))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1], LEARNED[0] + "+linear", "sphere-cos+linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision(operator, dtype, bias):
    compare(make_linear(operator, 48, 16, bias=bias, dtype=dtype), images(37, 48, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 24), (1, 24), (2, 1, 3, 24), (4, 3, 24)])
def test_shapes_of_the_input(shape):
    compare(make_linear("sphere-cos", 24), images(*shape))


@pytest.mark.parametrize("rows", [lambda x: x[:, 1], lambda x: x.transpose(0, 1), lambda x: x[..., ::2]])
def test_inputs_with_gaps(rows):
    compare(make_linear("sphere-cos", 7), rows(images(3, 4, 14))[..., :7])


@pytest.mark.parametrize("operator", ["sphere-cos", "sphere-cos+linear", LEARNED[0]])
def test_transposed_filters(operator):
    layer = make_linear(operator)
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    compare(layer, images(3, 7))


@pytest.mark.parametrize("scale", [0.0, 1e-10, 1e-3, 1e6, 1e15])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_extreme_norms(scale, eps):
    compare(make_linear("sphere-cos", eps=eps), scale * images(4, 7))


@pytest.mark.parametrize("size", [1e-7, 6e4])
def test_extreme_norms_in_float16(size):
    """The inner products with x itself would exceed the range; the smallest gradients of x are below it."""
    layer, x = make_linear("sphere-cos", 96, 8, dtype=torch.float16), (size * images(20, 96).sign()).half()
    check(layer, x, run=by_units, run_exactly=exactly, needs_input=size < 1)


@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1]])
def test_blended_layers(operator):
    layer, x = make_linear(operator, blend=0.3), images(4, 7)
    with launches() as names:
        check(layer, x, run=by_torch, run_exactly=exactly)
    assert "unit_rows_kernel" in names


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["scale"], ["weight", "bias", "scale"]], ids=str)
def test_frozen_tensors(frozen):
    layer = make_linear(LEARNED[1], 24, 16)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, images(9, 24), run=by_units, run_exactly=exactly)
    if len(frozen) == 1:
        check(layer, images(9, 24), run=by_units, run_exactly=exactly, needs_input=False)


def test_inference_needs_two_launches():
    layer = make_linear("sphere-cos")
    with launches() as names, torch.inference_mode():
        layer(images(3, 7))
    assert names == ["unit_rows_kernel", "unit_kernel"]


def test_no_pass_over_the_output():
    layer, x = make_linear("sphere-cos"), images(3, 7).requires_grad_()
    with launches() as names:
        layer(x).sum().backward()
    assert names[:2] == ["unit_rows_kernel", "unit_kernel"]
    assert sorted(names[2:]) == ["unit_gradient_kernel", "unit_rows_gradient_kernel"]


def test_wide_rows_are_computed_by_torch(monkeypatch):
    monkeypatch.setattr(unit_product, "MOST_FEATURES", 6)
    layer, x = make_linear("sphere-cos"), images(3, 7)
    with launches() as names:
        check(layer, x, run=by_torch, run_exactly=exactly)
    assert names == []


def test_changed_operators_and_constants_are_seen():
    layer, x = make_linear(LEARNED[0]), images(3, 7)
    layer(x)
    with torch.no_grad():
        layer.scale.mul_(2)
    check(layer, x, run=by_units, run_exactly=exactly)
    layer.operator = Operator.parse("sphere(learnable=True)-cos+linear")
    check(layer, x, run=by_units, run_exactly=exactly)


def test_a_constant_that_is_not_given_has_its_initial_value():
    x, w = images(3, 7), images(5, 7)
    found = dcnet.functional.decoupled_linear(x, w, operator="sphere(scale=Learnable(init=3.0))-cos")
    torch.testing.assert_close(found, 3 * dcnet.functional.decoupled_linear(x, w, operator="sphere-cos"))


# --- autograd, transforms, compilers ---


@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1], "sphere-cos+linear"])
def test_second_derivatives(operator):
    layer, x = make_linear(operator), images(4, 7).requires_grad_()
    double, doubled = exact(layer), x.detach().double().requires_grad_()
    found, wanted = [], []
    for net, given, kept in ((layer, x, found), (double, doubled, wanted)):
        tensors = [given, *net.parameters()]
        first = torch.autograd.grad(net(given).pow(3).sum(), tensors, create_graph=True)
        kept += torch.autograd.grad(sum(each.square().sum() for each in first), tensors)
    names = [str(i) for i in range(len(found))]
    assert_close(
        dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True)), 20 * TOLERANCE[torch.float32]
    )


def test_batched_gradients():
    layer, x = make_linear("sphere-cos"), images(4, 7).requires_grad_()
    tensors, output = [x, *layer.parameters()], layer(x)
    cotangents = torch.stack([cotangent_for(layer, x) for _ in range(3)])
    found = torch.autograd.grad(output, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        wanted = torch.autograd.grad(output, tensors, cotangent, retain_graph=True)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[i], other, rtol=1e-4, atol=1e-6)


def test_functional_transforms_use_torch():
    layer, x = make_linear("sphere-cos"), images(4, 3, 7)
    with launches() as names:
        found = torch.func.vmap(layer)(x)
        torch.func.grad(lambda x: layer(x).sum())(x)
    assert names == []
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", COSINES)
def test_formula_of_compilers(operator):
    """torch's operations that a compiler fuses."""
    layer = make_linear(operator, 24, 16)

    def formula(layer, x):
        return multiply_units(layer.operator, x, layer.weight, layer.bias, layer.options(), plain=False)

    check(layer, images(5, 24), run=formula, run_exactly=exactly)


@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1] + "+product", LEARNED[0] + "+linear"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_have_no_custom_operation(operator, dynamic, monkeypatch):
    """The graph multiplies unit rows: it has no elementwise operation on the output."""
    torch.compiler.reset()
    if not ON_GPU:
        # A compiler does not know attributes that a test adds.
        monkeypatch.delattr(torch.Tensor, "is_cuda")
    monkeypatch.setattr(dispatch, "_are_rows", lambda *given: True)
    monkeypatch.setattr(dispatch, "fits", lambda *given: True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    layer, x = make_linear(operator, 24, 16), images(5, 24)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    torch.testing.assert_close(compiled(x), exactly(layer, x), rtol=1e-4, atol=1e-5)
    (graph,) = graphs
    *_, last, output = graph.nodes
    assert last.target in (F.linear, torch._C._nn.linear)
    assert output.args[0][0] is last
    assert not any("dcnet" in str(node.target) for node in graph.nodes)


# --- autocast ---


def test_rows_and_filters_are_made_in_the_dtype_of_autocast(monkeypatch):
    """float32 rows are read once, and written in half precision."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    for operator in ("sphere-cos", *LEARNED, "sphere-cos+linear"):
        layer, x = make_linear(operator, 24, 16, bias=False), images(5, 24)
        with mock.patch.object(F, "linear", wraps=F.linear) as product:
            output = layer(x)
        assert [each.dtype for each in product.call_args.args[:2]] == [torch.bfloat16] * 2
        assert output.dtype == torch.bfloat16


needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1]])
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(operator, dtype):
    layer, x = make_linear(operator, 128, 256), images(4096, 128)

    def cast(layer, x):
        with torch.autocast("cuda", dtype):
            return by_units(layer, x)

    x.requires_grad_()
    cotangent = cotangent_for(layer, x)
    tensors = [x, *layer.parameters()]
    output = cast(layer, x)
    assert output.dtype == dtype
    found = torch.autograd.grad(output, tensors, cotangent.to(dtype))
    wanted = torch.autograd.grad(exactly(layer, x), tensors, cotangent)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 2 * TOLERANCE[dtype] * other.norm()


@needs_gpu
@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1] + "+linear"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(12608, 768, 768), (2049, 384, 1536), (3000, 1000, 520)])
def test_layers_of_real_size(operator, rows, inputs, outputs):
    compare(make_linear(operator, inputs, outputs, dtype=torch.bfloat16), images(rows, inputs, dtype=torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("operator", ["sphere-cos", LEARNED[1]])
def test_compiled_layers(operator):
    layer = make_linear(operator, 128, 256, dtype=torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)

    def run(_, x):
        return compiled(x)

    check(layer, images(4, 1024, 128, dtype=torch.bfloat16), run=run, run_exactly=exactly)
