"""The fused kernels against torch in float64: windows, sizes, and how tensors lie in memory."""

import pytest
import torch
import torch.nn.functional as F
from side_by_side import by_kernels, check, cotangent_for, images, make_layer
from torch import nn

# A weighting that constants enter, and a mean norm that has a gradient.
OPERATOR = "tanh-sigmoid(learnable=True)+product"
LAST = torch.channels_last


WINDOWS = {
    "plain": {},
    "stride": {"stride": 2},
    "stride of a pair": {"stride": (2, 3), "padding": 1},
    "stride beyond the window": {"stride": 3, "kernel": 2},
    "padding": {"padding": 1},
    "padding of a pair": {"padding": (2, 0)},
    "padding beyond the window": {"padding": 2, "kernel": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "same with dilation": {"padding": "same", "dilation": (1, 2)},
    "dilation": {"dilation": 2, "padding": 1},
    "dilation and stride": {"dilation": (2, 1), "stride": (1, 2), "padding": (2, 1)},
    "1x1": {"kernel": 1},
    "1x1 with stride": {"kernel": 1, "stride": 2},
    "5x3": {"kernel": (5, 3), "padding": (2, 1)},
    "even": {"kernel": (2, 4), "padding": (1, 2)},
    "groups": {"channels": 4, "filters": 6, "groups": 2, "padding": 1},
    "depthwise": {"channels": 3, "filters": 3, "groups": 3, "padding": 1},
    "depthwise with more filters": {"channels": 2, "filters": 4, "groups": 2, "stride": 2},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    layer = make_layer(OPERATOR, **WINDOWS[name])
    check(layer, images(2, layer.in_channels, 7, 6))


@pytest.mark.parametrize("name", ["stride of a pair", "dilation and stride", "1x1", "5x3", "groups", "depthwise"])
def test_windows_with_channels_last(name):
    layer = make_layer(OPERATOR, **WINDOWS[name])
    check(layer, images(2, layer.in_channels, 7, 6).contiguous(memory_format=LAST))


SIZES = {
    "one image": (1, 3, 5, 5, {}),
    "one channel": (2, 1, 5, 6, {}),
    "one filter": (2, 3, 5, 6, {"filters": 1}),
    "five channels": (2, 5, 5, 6, {"filters": 5}),
    "one pixel": (2, 3, 1, 1, {"padding": 1}),
    "one row": (1, 3, 1, 9, {"padding": 1}),
    "one output": (2, 3, 3, 3, {}),
    "many positions": (3, 2, 41, 43, {"padding": 1}),
    "many channels": (2, 96, 3, 4, {"kernel": 1}),
    "more channels than a tile": (2, 2100, 2, 2, {"kernel": 1}),
    "more channels than any tile": (1, 4200, 1, 2, {"kernel": 1}),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    *shape, settings = SIZES[name]
    check(make_layer(OPERATOR, shape[1], **settings), images(*shape))


@pytest.mark.parametrize("name", ["one channel", "one pixel", "many positions", "more channels than a tile"])
def test_sizes_with_channels_last(name):
    *shape, settings = SIZES[name]
    check(make_layer(OPERATOR, shape[1], **settings), images(*shape).contiguous(memory_format=LAST))


def test_filters_in_several_tiles_and_chunks():
    """Ninety-six are three chunks of a power of two; in the interpreter every filter takes its time."""
    check(make_layer("tanh-cos", filters=96, kernel=1), images(2, 3, 9, 9).contiguous(memory_format=LAST))


def test_filters_in_several_tiles_chunks_and_groups():
    check(make_layer("tanh-cos", 2, filters=96, groups=2, kernel=1, bias=False), images(2, 2, 9, 9))


@pytest.mark.parametrize("size", [1, 2])
def test_a_window_beyond_the_image_is_an_error(size):
    with pytest.raises(RuntimeError):
        by_kernels(make_layer("tanh-cos", kernel=3), images(1, 3, size, size))


# --- layouts ---


def unaligned(x):
    """The same numbers, one element behind the address of a whole tensor."""
    behind = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return behind.as_strided(x.shape, x.stride(), 1).copy_(x)


LAYOUTS = {
    "first": lambda x: x.contiguous(),
    "last": lambda x: x.contiguous(memory_format=LAST),
    "unaligned": unaligned,
    "unaligned last": lambda x: unaligned(x.contiguous(memory_format=LAST)),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "outside in": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
    "with gaps": lambda x: torch.stack([x, -x], -1)[..., 0],
    "part of the channels": lambda x: torch.cat([-x, x], 1)[:, x.shape[1] :],
    "the same again": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize(
    ("of_input", "of_filters"),
    [*((name, "first") for name in LAYOUTS), *(("last", name) for name in LAYOUTS), ("first", "outside in")],
)
def test_layouts_of_input_and_filters(of_input, of_filters):
    layer = make_layer(OPERATOR)
    layer.weight = nn.Parameter(LAYOUTS[of_filters](layer.weight.detach()))
    check(layer, LAYOUTS[of_input](images(2, 3, 5, 6)))


@pytest.mark.parametrize(
    ("of_gradient", "of_input"), [*((name, "first") for name in LAYOUTS), ("first", "last"), ("unaligned last", "last")]
)
def test_layouts_of_the_gradient(of_gradient, of_input):
    layer, x = make_layer(OPERATOR, bias=False), LAYOUTS[of_input](images(2, 3, 5, 6))
    check(layer, x, LAYOUTS[of_gradient](cotangent_for(layer, x)))


@pytest.mark.parametrize("of_input", ["first", "last"])
def test_a_gradient_of_one_number(of_input):
    """What `output.sum().backward()` gives: no strides at all."""
    layer, x = make_layer(OPERATOR), LAYOUTS[of_input](images(2, 3, 5, 6))
    check(layer, x, torch.ones((), device=x.device).expand(cotangent_for(layer, x).shape))


@pytest.mark.parametrize("of_input", ["first", "last"])
@pytest.mark.parametrize("of_filters", ["first", "last"])
def test_the_output_lies_as_that_of_a_convolution(of_input, of_filters):
    layer, x = make_layer(OPERATOR), LAYOUTS[of_input](images(2, 3, 5, 6))
    layer.weight = nn.Parameter(LAYOUTS[of_filters](layer.weight.detach()))
    assert by_kernels(layer, x).stride() == F.conv2d(x, layer.weight).stride()


@pytest.mark.parametrize("name", ["bias", "radius", "k"])
def test_vectors_with_gaps(name):
    """A column of a table is no less a bias than a tensor of its own."""
    layer = make_layer("tanh-sigmoid(k=Learnable(init=0.3,per_channel=True))", filters=4)
    table = torch.stack([layer.get_parameter(name).detach(), torch.full((4,), 9.0, device=layer.weight.device)], 1)
    setattr(layer, name, nn.Parameter(table[:, 0]))
    check(layer, images(2, 3, 5, 6))


def test_addresses_may_change_from_call_to_call():
    """What was compiled for aligned addresses must not meet others, nor the other way round."""
    layer = make_layer(OPERATOR)
    for layout in ("first", "unaligned", "first", "unaligned"):
        check(layer, LAYOUTS[layout](images(2, 3, 5, 6)))
