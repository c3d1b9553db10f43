"""Depthwise convolutions in their own kernels, compared with torch in float64 and with the equations in loops."""

import copy
import math

import pytest
import reference
import torch
from helpers.kernel_comparison import (
    DEVICE,
    assert_same_bits,
    by_kernels,
    check,
    cotangent_for,
    exact,
    fused_operators,
    images,
    make_layer,
    new_memory_is_nan,
    one_of_each,
    quiet_numpy,
    results,
)
from helpers.operators import operator_params

from dcnet import Operator, kernels
from dcnet.kernels import dispatch
from dcnet.kernels.convolution import Call, Convolution
from dcnet.kernels.depthwise import TILINGS, Depthwise, Tiling, balanced, rows_read, tile_shape
from dcnet.kernels.launch import Launch, address_of
from dcnet.kernels.plan import Window

LAST, FIRST = torch.channels_last, torch.contiguous_format
LEARNING = "tanh-sigmoid(learnable=True)+product"


def depthwise(operator=LEARNING, channels=3, kernel=3, **settings):
    return make_layer(operator, channels, channels, kernel, groups=channels, **settings)


def compiled_for(x, w, groups):
    window = ((1, 1), (1, 1), (1, 1), groups, 0)
    return Call(x, w, None, [], None, None, "ball(radius=1.0)-cos", 1e-4, *window).convolution(in_place=True)


@pytest.mark.parametrize(
    ("channels", "filters", "groups", "kernel", "kind"),
    [(3, 3, 3, 3, Depthwise), (3, 3, 3, 7, Depthwise), (3, 3, 3, 8, Convolution), (2, 4, 2, 3, Convolution),
     (4, 4, 2, 3, Convolution), (1, 1, 1, 3, Convolution)],
)  # fmt: skip
def test_only_one_filter_per_channel_and_small_windows(channels, filters, groups, kernel, kind):
    x, w = torch.empty(2, channels, 9, 9), torch.empty(filters, channels // groups, kernel, kernel)
    assert type(compiled_for(x, w, groups)) is kind


@pytest.mark.parametrize("operator", operator_params(fused_operators()))
def test_every_operator(operator):
    check(depthwise(operator, channels=2, padding=1, bias=False), images(1, 2, 4, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", one_of_each())
def test_half_precision(operator, dtype):
    check(depthwise(operator, padding=1, dtype=dtype), images(2, 3, 5, 6, dtype=dtype).contiguous(memory_format=LAST))


WINDOWS = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "stride of a pair": {"stride": (2, 3), "padding": 1},
    "stride beyond the window": {"stride": 3, "kernel": 2},
    "dilation": {"dilation": 2, "padding": 2},
    "dilation and stride": {"dilation": (2, 1), "stride": (1, 2), "padding": (2, 1)},
    "5x3": {"kernel": (5, 3), "padding": (2, 1)},
    "7x7": {"kernel": 7, "padding": 3, "bias": False},
    "7x7 with stride": {"kernel": 7, "padding": 3, "stride": 2},
    "even": {"kernel": (2, 4), "padding": (1, 2)},
    "5x5 with dilation": {"kernel": 5, "padding": (2, 4), "dilation": (1, 2)},
    # Cosines of 1 and -1, where the angle of LEARNING does not depend on k.
    "1x1": {"kernel": 1, "operator": "tanh-linear+product"},
    "padding beyond the window": {"kernel": 2, "padding": 3},
    "same": {"padding": "same", "dilation": (1, 2)},
}


@pytest.mark.parametrize("layout", [FIRST, LAST], ids=["first", "last"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, layout):
    check(depthwise(**WINDOWS[name]), images(1, 3, 9, 7).contiguous(memory_format=layout))


@pytest.mark.parametrize(("channels", "size"), [(5, (1, 1)), (2, (1, 40)), (40, (5, 2)), (65, (3, 3)), (2, (19, 33))])
def test_sizes(channels, size):
    for layout in (FIRST, LAST):
        check(depthwise(channels=channels, padding=1), images(2, channels, *size).contiguous(memory_format=layout))


@pytest.mark.parametrize("layout", [FIRST, LAST], ids=["first", "last"])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_output_of_the_equations_in_loops(stride, padding, dilation, layout):
    layer = depthwise(
        "tanh-sqcos+linear", stride=stride, padding=padding, dilation=dilation, bias=False
    ).requires_grad_(False)
    layer.train()
    x = images(2, 3, 6, 5)
    radius = Operator.parse("tanh-sqcos+linear").learned["radius"]
    rho = (layer.radius.double() ** 2 + radius.floor).tolist()
    wanted = reference.convolution(
        ("tanh", "sqcos", "linear"), x.cpu(), layer.weight.cpu(), rho, stride, [(padding, padding)] * 2, dilation,
        groups=3, relative=True,
    )  # fmt: skip
    found = by_kernels(layer, x.contiguous(memory_format=layout))
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_single_tile():
    """One program, which also keeps the means."""
    check(depthwise("tanh-cos"), images(1, 3, 3, 4))


@pytest.mark.parametrize("mean_norm", [0.0, 2.5])
@pytest.mark.parametrize("training", [True, False])
def test_mean_norms(training, mean_norm):
    layer = depthwise("tanh-cos").train(training)
    layer.mean_norm.fill_(mean_norm)
    with new_memory_is_nan():
        check(layer, 0.4 * images(2, 3, 5, 6))
    assert (layer.mean_norm != mean_norm) == training


@pytest.mark.parametrize("frozen", [["input"], ["weight"], ["input", "weight"], ["bias", "radius", "k"]], ids=str)
@pytest.mark.parametrize("kernel", [3, 5])
def test_frozen_tensors(frozen, kernel):
    layer = depthwise(kernel=kernel, padding=2)
    for name in set(frozen) - {"input"}:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, images(2, 3, 5, 6), needs_input="input" not in frozen)


@quiet_numpy
@pytest.mark.parametrize("operator", one_of_each())
def test_nan_affects_only_its_own_patches(operator):
    layer, x = depthwise(operator).eval(), images(2, 3, 7, 7)
    x[1, 1, 2, 2] = math.nan
    assert torch.equal(by_kernels(layer, x).isnan(), exact(layer)(x.double()).isnan())


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_zero_patches(eps):
    x = images(2, 3, 6, 6)
    x[0] = 0
    check(depthwise("log-sqcos+joint", padding=2, eps=eps, bias=False), x)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("layout", [FIRST, LAST], ids=["first", "last"])
def test_results_are_deterministic_and_no_memory_is_read_before_it_is_written(layout, kernel):
    layer = depthwise(channels=5, kernel=kernel, padding=1)
    x = images(3, 5, 13, 11).contiguous(memory_format=layout).requires_grad_()
    cotangent, found = cotangent_for(layer, x), []
    for fill in (False, True):
        with new_memory_is_nan(fill):
            found.append(results(by_kernels, copy.deepcopy(layer), x, cotangent))
    assert_same_bits(*found)


def test_window_larger_than_the_image_raises():
    with pytest.raises(RuntimeError, match="needs an input"):
        by_kernels(depthwise(), images(1, 3, 2, 2))


@pytest.mark.parametrize(
    "window", [{"stride": 0}, {"padding": (1, -1)}, {"dilation": 0}, {"stride": (1, 1, 1)}], ids=str
)
def test_impossible_windows_raise(window):
    given = {"stride": 1, "padding": 0, "dilation": 1, **window}
    with pytest.raises(RuntimeError, match=f"{next(iter(window))} must be"):
        dispatch.conv2d(images(1, 3, 5, 5), images(3, 1, 3, 3), None, *given.values(), 3, {"operator": "tanh-cos"})


def test_normalized_filters_can_be_moved_to_an_unaligned_address(monkeypatch):
    """As hooks of saved tensors may do; kernels that are launched by address expect multiples of 16 bytes."""
    layer, x, seen = depthwise("tanh-cos"), images(2, 3, 5, 6).requires_grad_(), []
    usual = Launch.__call__

    def call(self, *given, stream, aligned):
        seen.append((aligned, all(address % 16 == 0 for address in map(address_of, given) if type(address) is int)))
        usual(self, *given, stream=stream, aligned=aligned)

    def moved(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: moved(t) if t.shape == (9, 3) else t):
        output = by_kernels(layer, x)
        monkeypatch.setattr(Launch, "__call__", call)
        output.sum().backward()
    assert all(really or not said for said, really in seen)
    assert not all(really for _, really in seen)


def test_operation_passes_opcheck():
    """The shapes that compilers are told are those of the operation."""
    x, w = images(2, 3, 6, 5).contiguous(memory_format=LAST).requires_grad_(), images(3, 1, 3, 3).requires_grad_()
    given = (
        x,
        w,
        None,
        torch.ones(3, device=DEVICE, requires_grad=True),
        None,
        None,
        None,
        None,
        None,
        "tanh-cos",
        1e-4,
    )
    window = ((1, 1), (1, 1), (1, 1), 3, 1)
    names = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.dcnet.conv2d.default, (*given, *window), test_utils=names)


@pytest.fixture
def small_tiles(monkeypatch):
    """Small images already take several blocks of channels, columns and rows, and several steps of the last sum."""
    tiling = Tiling(rows=2, elements=16, channels=4, warps=1, programs=6)
    monkeypatch.setattr(kernels.depthwise, "TILINGS", dict.fromkeys(TILINGS, (tiling, tiling)))
    monkeypatch.setattr(kernels.depthwise, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(kernels.depthwise, "FEWEST", 4)
    monkeypatch.setattr(kernels.depthwise, "SUM_BLOCK", 2)
    monkeypatch.setattr(kernels.depthwise, "SUM_WIDTH", 4)
    monkeypatch.setattr(kernels.convolution, "_compiled", {})
    monkeypatch.setattr(kernels.known_calls, "_known", {})


@pytest.mark.parametrize(("kernel", "layout"), [(3, FIRST), (3, LAST), ((2, 5), FIRST)], ids=str)
def test_many_tiles(kernel, layout, small_tiles):
    layer, x = depthwise(channels=7, kernel=kernel, padding=1), images(2, 7, 3, 8).contiguous(memory_format=layout)
    passes = compiled_for(x, layer.weight, 7).passes
    for tiles in (passes.norm_tiles, passes.out_tiles, passes.back_tiles, *passes.pixel_tiles.values()):
        assert tiles.channel_blocks > 1
        assert kernels.depthwise.SUM_BLOCK < tiles.programs < tiles.count
    check(layer, x)


def test_pixels_that_no_patch_sees_do_not_change_the_sums():
    """Three columns of the output are in tiles of four."""
    layer, x = depthwise(stride=3), images(2, 3, 3, 11)
    x[..., 9:] = math.nan
    learned = [layer.bias, layer.radius, layer.k]
    found, wanted = (
        torch.autograd.grad(by_kernels(layer, pixels).square().sum(), learned) for pixels in (x, x[..., :9])
    )
    torch.testing.assert_close(found, wanted)


def test_gradients_of_norms_beyond_the_range_of_float16():
    layer = depthwise("tanh(radius=1.0)-sqcos", dtype=torch.float16, bias=False, eps=1e-6)
    x = 1e-3 * images(2, 3, 5, 6, dtype=torch.float16)
    check(layer, x, cotangent=2000 * cotangent_for(layer, x))


def lanes_for(width, channels, columns, many):
    """The lanes of all tiles of one row of an image."""
    return math.ceil(width / columns) * columns * math.ceil(channels / many) * many


@pytest.mark.parametrize(("width", "channels"), [(28, 256), (56, 96), (7, 960), (112, 40)])
def test_tiles_leave_few_lanes_idle(width, channels):
    for tiling in (tiling for pair in TILINGS.values() for tiling in pair):
        columns, many = tile_shape(tiling, width, channels, channels_last=True)
        assert columns * many == tiling.elements
        shapes = [(tiling.elements // 2**i, 2**i) for i in range(4, 11) if 0 < tiling.elements // 2**i < 2 * width]
        assert lanes_for(width, channels, columns, many) == min(lanes_for(width, channels, *shape) for shape in shapes)


def test_rows_of_tiles_are_balanced():
    assert [balanced(size, 8) for size in (1, 7, 8, 10, 28, 32, 56)] == [1, 7, 8, 5, 7, 8, 8]


def test_rows_read_by_a_tile():
    assert rows_read(2, 1, 3, 1) == (True,) * 4
    assert rows_read(1, 2, 3, 2) == (True, False, True, False, True)


def test_partial_sums_are_few_for_any_number_of_channels():
    window = Window(512, 4096, (56, 56), 4096, (3, 3), (1, 1), (1, 1), (1, 1), 4096, channels_last=True)
    assert window.depthwise
    x, w = torch.empty(512, 4096, 56, 56, device="meta").contiguous(memory_format=LAST), torch.empty(4096, 1, 3, 3)
    fused = compiled_for(x, w, 4096)
    assert fused.passes.back_tiles.sums <= 2**14
