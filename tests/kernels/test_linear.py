"""Linear layers, sequences and 1x1 convolutions in the fused kernels, compared with torch in float64."""

import copy
from unittest import mock

import pytest
import torch
from helpers.kernel_comparison import (
    DEVICE,
    HALVES,
    ON_GPU,
    alternating,
    assert_same_bits,
    check,
    cotangent_for,
    fused_operators,
    images,
    make_layer,
    new_memory_is_nan,
    one_of_each,
    quiet_numpy,
    results,
)
from helpers.operators import operator_params

import dcnet
from dcnet.kernels import convolution, dispatch, known_calls, passes
from dcnet.kernels.launch import Launch
from dcnet.kernels.passes import cut, row_width, slices_of
from dcnet.kernels.plan import Window

pytestmark = quiet_numpy


@pytest.fixture(autouse=True)
def _on_gpu(request):
    """Without a GPU, tensors of the CPU pretend to be on one."""
    if ON_GPU:
        yield
        return
    capability = mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))
    with mock.patch.object(torch.Tensor, "is_cuda", True, create=True), capability:
        yield


def make_linear(operator, inputs=7, outputs=5, *, dtype=torch.float32, **settings):
    """A layer with different filters and constants, as after training."""
    layer = dcnet.DecoupledLinear(inputs, outputs, operator=operator, **settings)
    with torch.no_grad():
        layer.weight.mul_(torch.empty(outputs, 1).uniform_(0.5, 2))
        for name in layer.operator.learned:
            stored = layer.get_parameter(name)
            stored.mul_(torch.empty_like(stored).uniform_(0.7, 1.3))
    return layer.to(DEVICE, dtype)


def by_kernels(layer, x):
    """The layer, which must use the kernels."""
    output = dispatch.linear(x, layer.weight, layer.bias, layer.options())
    assert output is not None
    return output


def by_torch(layer, x):
    with dcnet.kernels.use_kernels(False):
        return layer(x)


def run_before(layer, x):
    """Runs a layer once, so that the next call finds its kernels; the running mean stays the same."""
    state = copy.deepcopy(layer.state_dict())
    by_kernels(layer, x)
    layer.load_state_dict(state)


def compare(layer, x):
    """Output, all gradients and the running mean, compared with float64."""
    check(layer, x.detach(), run=by_kernels, run_exactly=by_torch)


def compare_later(layer, x):
    """The same for a call that finds the kernels of an earlier one."""
    run_before(layer, x)
    assert dispatch.find_known(x, layer.weight, layer.bias, *dispatch.ROWS, layer.options()) is not None
    compare(layer, x)


@pytest.mark.parametrize("operator", operator_params(fused_operators()))
def test_every_operator(operator):
    compare(make_linear(operator), images(2, 3, 7))


@pytest.mark.parametrize(
    ("operator", "dtype", "bias"),
    alternating(one_of_each(), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]),
)
def test_dtypes_with_and_without_bias(operator, dtype, bias):
    compare(make_linear(operator, 16, 8, bias=bias, dtype=dtype), images(5, 16, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (2, 1, 3, 7), (1, 1, 7)])
def test_shapes_of_the_input(shape):
    compare_later(make_linear("tanh-cos"), images(*shape))


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 5), (7, 1), (1, 1)])
def test_one_feature(inputs, outputs):
    compare(make_linear("tanh-sqcos+joint", inputs, outputs), images(4, inputs))


@pytest.fixture
def narrow_slices(monkeypatch):
    """Layers of more than 8 channels are divided into slices, if they have a divisor of 8, 6 or 4."""
    monkeypatch.setattr(passes, "MOST_WIDTH", 8)
    monkeypatch.setattr(passes, "SLICE_WIDTHS", (8, 6, 4))
    forget_compiled(monkeypatch)


def forget_compiled(monkeypatch):
    monkeypatch.setattr(convolution, "_compiled", {})
    monkeypatch.setattr(known_calls, "_known", {})


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 5), (7, 16), (12, 20), (7, 11)])
@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+product"])
def test_slices(operator, inputs, outputs, narrow_slices):
    compare(make_linear(operator, inputs, outputs), images(40, inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "inputs", "outputs"),
    [("tanh-cos", 640, 521), ("seg-sqcos+product", 7, 768), ("seg-sqcos+product", 576, 5)],
)
def test_slices_of_wide_layers(operator, inputs, outputs):
    compare(make_linear(operator, inputs, outputs), images(9, inputs))


def test_numbers_of_slices():
    assert [slices_of(channels) for channels in (5, 512, 768, 1000, 1536, 4096)] == [1, 1, 2, 1, 3, 8]
    assert cut((1, 10, 0, 1536, 1, 1536), 3) == (1, 10, 0, 1536, 1, 512)


@pytest.mark.parametrize("rows", [lambda x: x[:, 1], lambda x: x.transpose(0, 1), lambda x: x[..., ::2]])
def test_inputs_with_gaps(rows):
    compare_later(make_linear("tanh-cos", 7), rows(images(3, 4, 14))[..., :7])


@pytest.mark.parametrize("operator", one_of_each())
def test_later_calls(operator):
    compare_later(make_linear(operator), images(3, 7))


def test_transposed_filters():
    layer = make_linear("tanh-cos+linear")
    layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    compare_later(layer, images(3, 7))


@pytest.mark.parametrize("operator", ["linear-cos", "linear(scale=0.7)-cos", "linear-cos+linear"])
def test_norms_that_cancel(operator):
    compare(make_linear(operator), images(3, 7))


@pytest.mark.parametrize("scale", [0.0, 1e-10, 1e-3, 1e6])
@pytest.mark.parametrize("operator", ["tanh-cos", "log-linear+joint", "sphere-sqcos"])
def test_extreme_norms(operator, scale):
    compare(make_linear(operator), scale * images(4, 7))


def test_rows_of_different_norms():
    compare(make_linear("tanh-cos"), images(4, 7) * torch.tensor([0.0, 1e-3, 1.0, 1e4], device=DEVICE)[:, None])


def test_a_second_call_gives_the_same_bits():
    layer, x = make_linear("tanh-cos").eval(), images(4, 7)
    with torch.no_grad():
        assert_same_bits({"output": by_kernels(layer, x)}, {"output": by_kernels(layer, x)})


@pytest.mark.parametrize("later", [False, True])
def test_second_derivatives(later):
    layer, x = make_linear("tanh(radius=1.5)-cos"), images(2, 7).requires_grad_()
    if later:
        run_before(layer, x)
    (gradient,) = torch.autograd.grad(by_kernels(layer, x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    (gradient,) = torch.autograd.grad(by_torch(layer, x).square().sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(gradient.square().sum(), x)
    torch.testing.assert_close(second, wanted, rtol=1e-4, atol=1e-5)


def unsupported():
    layer = make_linear("tanh-cos")
    nested = torch.nested.nested_tensor([torch.randn(2, 7), torch.randn(3, 7)], layout=torch.jagged)
    return {
        "float64": (layer.weight.double(), None, torch.randn(3, 7).double()),
        "one vector": (layer.weight, None, torch.randn(7)),
        "no rows": (layer.weight, None, torch.randn(0, 7)),
        "other features": (layer.weight, None, torch.randn(3, 6)),
        "a bias that is broadcast": (layer.weight, torch.randn(1), torch.randn(3, 7)),
        "nested": (layer.weight, None, nested),
    }


@pytest.mark.parametrize("name", list(unsupported()))
def test_what_falls_back_to_torch(name):
    w, bias, x = unsupported()[name]
    assert dispatch.linear(x.to(DEVICE), w, bias, {"operator": "tanh-cos"}) is None


# --- sequences ---


def sequences_by_kernels(layer, x):
    window = (layer.stride, layer.padding, layer.dilation, layer.groups)
    output = dispatch.conv1d(x, layer.weight, layer.bias, *window, layer.options())
    assert output is not None
    return output


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "window",
    [{}, {"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}, {"padding": "valid"}, {"groups": 2}],
    ids=str,
)
@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+product"])
def test_sequences(operator, window, channels_last):
    layer = dcnet.DecoupledConv1d(4, 6, 3, operator=operator, **window).to(DEVICE)
    x = images(2, 9, 4).transpose(1, 2) if channels_last else images(2, 4, 9)
    check(layer, x, run=sequences_by_kernels, run_exactly=by_torch)


def test_one_sequence_without_a_batch_falls_back_to_torch():
    layer = dcnet.DecoupledConv1d(4, 6, 3, operator="tanh-cos").to(DEVICE)
    assert dispatch.conv1d(images(4, 9), layer.weight, None, 1, 0, 1, 1, layer.options()) is None
    assert layer(images(4, 9)).shape == (6, 7)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_two_numbers_for_a_sequence_raise_the_error_of_torch(name):
    window = {"stride": 1, "padding": 0, "dilation": 1, name: (1, 2)}
    with pytest.raises(RuntimeError, match=f"{name} to be a single integer"):
        dcnet.functional.decoupled_conv1d(images(2, 4, 9), images(6, 4, 3), operator="tanh-cos", **window)


# --- pointwise convolutions ---


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["tanh-cos", "seg-linear+product"])
def test_pointwise_convolutions_multiply_matrices(operator, dtype):
    layer = make_layer(operator, 8, 16, 1, bias=False, dtype=dtype).to(memory_format=torch.channels_last)
    x = images(2, 8, 3, 5, dtype=dtype).to(memory_format=torch.channels_last)
    window = Window.of(x, layer.weight, (1, 1), (0, 0), (1, 1), 1)
    with mock.patch.object(torch, "convolution", side_effect=AssertionError):
        window.convolve(x, layer.weight.detach())
    check(layer, x)


def test_strided_and_padded_windows_are_convolved():
    x = images(2, 8, 4, 6, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    w = images(4, 8, 1, 1, dtype=torch.bfloat16)
    for stride, padding in (((2, 1), (0, 0)), ((1, 1), (1, 0))):
        found = Window.of(x, w, stride, padding, (1, 1), 1).convolve(x, w)
        torch.testing.assert_close(found, torch.conv2d(x, w, None, stride, padding))


# --- norms of rows ---


@pytest.fixture
def small_programs(monkeypatch):
    """Few rows already take several tiles of several programs."""
    monkeypatch.setattr(passes, "SQUARES", passes.Tiling(256, 0, 4, 1))
    monkeypatch.setattr(passes, "MOST_SUMS", 2)
    forget_compiled(monkeypatch)


@pytest.mark.parametrize("inputs", [3, 64, 96, 192, 300])
@pytest.mark.parametrize("operator", ["tanh-cos", "tanh(radius=2.0)-cos", "seg-sqcos+joint"])
def test_many_tiles_of_rows(operator, inputs, small_programs):
    compare(make_linear(operator, inputs, 8), images(37, inputs))


def test_width_of_rows():
    assert [row_width(channels) for channels in (3, 64, 96, 192, 384, 768, 1000)] == [4, 64, 128, 64, 128, 256, 1024]


@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+linear"])
def test_results_are_deterministic_and_no_memory_is_read_before_it_is_written(operator, small_programs):
    layer, x = make_linear(operator, 32, 48, dtype=torch.bfloat16), images(37, 32, dtype=torch.bfloat16)
    cotangent, found = cotangent_for(layer, x), []
    for fill in (False, True):
        with new_memory_is_nan(fill):
            found.append(results(by_kernels, copy.deepcopy(layer), x.clone().requires_grad_(), cotangent))
    assert_same_bits(*found)


@pytest.mark.parametrize("mean_norm", [0.0, 2.5])
@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+product"])
def test_running_means(operator, mean_norm, small_programs):
    layer = make_linear(operator, 12, 5).eval()
    layer.mean_norm.fill_(mean_norm)
    with new_memory_is_nan():
        compare(layer, images(37, 12))


def test_norms_beyond_the_last_row_are_not_written():
    """After them, the state has constants of the channels, which other programs write."""
    x, w = images(5, 6).view(1, 1, 5, 6).permute(0, 3, 1, 2), images(4, 6, 1, 1)
    window = ((1, 1), (0, 0), (1, 1), 1, passes.NO_MEAN)
    call = convolution.Call(x, w, None, [], None, None, "tanh(radius=1.0)-cos", 1e-4, *window)
    fused = call.convolution(in_place=True)
    assert fused.passes.of_rows
    with new_memory_is_nan():
        *_, state = fused.forward(call)
    (_, rows), (table, _), _ = fused.state.spans
    assert state[:rows].isfinite().all()
    assert state[rows:table].isnan().all()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (torch.channels_last, {}),
        (torch.channels_last, {"dilation": 2}),
        (torch.channels_last, {"groups": 2}),
        (torch.channels_last, {"stride": 2}),
        (torch.channels_last, {"stride": (1, 2)}),
        (torch.channels_last, {"padding": (1, 0)}),
        (torch.contiguous_format, {}),
    ],
    ids=str,
)
def test_pointwise_windows(layout, settings):
    layer = make_layer("tanh-sqcos+product", 8, 6, 1, **settings)
    check(layer, images(3, 8, 3, 5).contiguous(memory_format=layout))


@pytest.mark.parametrize("outputs", [5, 16])
def test_rows_need_no_windows(outputs, narrow_slices, monkeypatch):
    """One launch for the norms and one for their gradient, in place of two each."""
    launched = []
    call = Launch.__call__

    def note(self, *given, **options):
        launched.append(self.kernel)
        call(self, *given, **options)

    monkeypatch.setattr(Launch, "__call__", note)
    layer, x = make_linear("tanh-cos", 6, outputs), images(9, 6).requires_grad_()
    by_kernels(layer, x).sum().backward()
    names = [kernel.fn.__name__ for kernel in launched]
    assert names == ["prepare_rows_kernel", "apply_kernel", "back_kernel", "add_rows_kernel", "filter_gradient_kernel"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operator", ["tanh-cos", "log-sqcos"])
def test_inner_products_beyond_the_range_of_float16(operator, bias):
    """They are clamped to it, as in convolutions."""
    layer = make_linear(operator, 32, 48, bias=bias, dtype=torch.float16).eval()
    with torch.no_grad():
        layer.weight.abs_()
    x = torch.full((20, 32), 6e4, device=DEVICE, dtype=torch.float16).requires_grad_()
    output = by_kernels(layer, x)
    output.sum().backward()
    assert all(value.isfinite().all() for value in (output, x.grad, *(one.grad for one in layer.parameters())))


@pytest.mark.parametrize("frozen", [["weight", "radius"], ["bias", "radius"], ["weight", "bias"]], ids=str)
def test_frozen_tensors(frozen):
    layer = make_linear("tanh-cos+linear", 32, 48, dtype=torch.bfloat16)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, images(37, 32, dtype=torch.bfloat16), run=by_kernels, run_exactly=by_torch, needs_input=False)


@pytest.mark.parametrize("needs", ["input", "filters"])
def test_one_gradient(needs):
    layer, x = make_linear("tanh-cos", 32, 48, dtype=torch.bfloat16), images(37, 32, dtype=torch.bfloat16)
    layer.weight.requires_grad_(needs == "filters")
    check(layer, x, run=by_kernels, run_exactly=by_torch, needs_input=needs == "input")


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
REAL = [(12608, 768, 768), (2049, 384, 1536), (4096, 1536, 384), (3000, 1000, 520)]


@needs_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), REAL)
def test_layers_of_real_size(rows, inputs, outputs, bias):
    layer = make_linear("tanh-cos", inputs, outputs, bias=bias, dtype=torch.bfloat16)
    compare(layer, images(rows, inputs, dtype=torch.bfloat16))


@needs_gpu
def test_layers_in_float32():
    compare(make_linear("tanh-cos", 384, 640), images(4096, 384))


@needs_gpu
@pytest.mark.parametrize("operator", ["tanh-cos", "seg-sqcos+product", "linear-cos"])
def test_compiled_layers(operator):
    layer = make_linear(operator, 128, 256, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    run = lambda _, x: compiled(x)  # noqa: E731
    check(layer, images(4, 1024, 128, dtype=torch.bfloat16), run=run, run_exactly=by_torch)


@needs_gpu
def test_layers_in_a_cuda_graph():
    layer = make_linear("tanh-cos", 128, 256, dtype=torch.bfloat16).eval()
    x = images(4096, 128, dtype=torch.bfloat16).requires_grad_()
    cotangent, parameters = images(4096, 256, dtype=torch.bfloat16), [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x), parameters, cotangent)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(layer(x), parameters, cotangent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(layer(x), parameters, cotangent)
    graph.replay()
    torch.cuda.synchronize()
    for made, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(made, value, rtol=2e-2, atol=2e-2 * value.abs().max().item())


@needs_gpu
def test_autocast():
    layer, x = make_linear("tanh-cos", 128, 256), images(4096, 128)
    with torch.autocast("cuda", torch.bfloat16), mock.patch.object(dispatch, "conv2d", wraps=dispatch.conv2d) as taken:
        output = layer(x)
    taken.assert_called_once()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), by_torch(layer.eval(), x), rtol=3e-2, atol=3e-2)
