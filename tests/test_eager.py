"""The eager path: strides, paddings and dilations compared with plain loops, and the depth of a call."""

import itertools
import sys
from pathlib import Path

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers.operators import pairwise_operators

import dcnet

# --- strides, dilations, groups, paddings, odd sizes and other dimensions, compared with plain loops ---


NAMES = ("tanh", "sqcos", "unweighted")
OPERATOR = "tanh(radius=Radius(learnable=False))-sqcos"


def assert_layer_is_reference(layer, x, padding, mode="zeros"):
    expected = reference.convolution(
        NAMES,
        x,
        layer.weight.detach(),
        [1.0] * layer.out_channels,
        layer.stride[0],
        padding,
        layer.dilation[0],
        layer.groups,
        mode,
        relative=True,
    )
    if layer.bias is not None:
        expected += layer.bias.detach().view(-1, *[1] * (x.dim() - 2))
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_strides_paddings_dilations_groups(stride, padding, dilation, groups):
    layer = dcnet.DecoupledConv2d(4, 4, 3, stride, padding, dilation, groups, operator=OPERATOR, dtype=torch.float64)
    x = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    assert_layer_is_reference(layer, x, [(padding, padding)] * 2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch warns for its own layer too
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(1, 2), "same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4), (1, 1), (5, 2)])
def test_padding_modes(mode, padding, kernel):
    layer = dcnet.DecoupledConv2d(
        2, 3, kernel, padding=padding, padding_mode=mode, bias=False, operator=OPERATOR, dtype=torch.float64
    )
    ends = {
        "same": [((k - 1) // 2, k // 2) for k in kernel],
        "valid": [(0, 0), (0, 0)],
        (1, 2): [(1, 1), (2, 2)],
    }[padding]
    assert_layer_is_reference(layer, torch.randn(1, 2, 6, 7, dtype=torch.float64), ends, mode)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_same_padding_with_dilation(mode):
    layer = dcnet.DecoupledConv2d(
        2, 3, (3, 2), padding="same", dilation=2, padding_mode=mode, operator=OPERATOR, dtype=torch.float64
    )
    assert_layer_is_reference(layer, torch.randn(1, 2, 6, 7, dtype=torch.float64), [(2, 2), (1, 1)], mode)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_and_three_dimensions(dilation, mode, groups):
    for kind, x in [
        (dcnet.DecoupledConv1d, torch.randn(2, 2, 9, dtype=torch.float64)),
        (dcnet.DecoupledConv3d, torch.randn(1, 2, 5, 4, 5, dtype=torch.float64)),
    ]:
        layer = kind(2, 4, 2, 2, 1, dilation, groups, True, mode, operator=OPERATOR, dtype=torch.float64)
        assert_layer_is_reference(layer, x, [(1, 1)] * (x.dim() - 2), mode)


def test_linear_layer_on_any_leading_shape():
    layer = dcnet.DecoupledLinear(5, 3, operator=OPERATOR, dtype=torch.float64)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    rows = x.view(-1, 5, 1, 1)
    expected = reference.convolution(NAMES, rows, layer.weight.detach()[..., None, None], [1.0] * 3, relative=True)
    torch.testing.assert_close(layer(x).detach(), expected.view(2, 3, 4, 3) + layer.bias.detach())
    assert layer(x[0, 0, 0]).shape == (3,)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_patch_norm_equals_a_convolution_with_ones(dims):
    """Tests many windows, since the norm is computed in three different ways."""
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    for size, stride, before, after, dilation, groups in itertools.product(
        (1, 2, 3), (1, 2), (0, 2), (0, 1), (1, 3), (1, 2)
    ):
        x = torch.randn(2, 4, *[8, 7, 9][:dims], dtype=torch.float64)
        norm = dcnet.functional.patch_norm(
            x, [size] * dims, [stride] * dims, [(before, after)] * dims, [dilation] * dims, groups, 1e-4
        )
        padded = F.pad(x.square(), [before, after] * dims)
        ones = torch.ones(groups, 4 // groups, *[size] * dims, dtype=torch.float64)
        expected = (conv(padded, ones, None, stride, 0, dilation, groups) + 1e-4).sqrt()
        torch.testing.assert_close(norm, expected)


def test_output_shape_and_unbatched_input_match_torch():
    for dims, kind, plain in [
        (1, dcnet.DecoupledConv1d, torch.nn.Conv1d),
        (2, dcnet.DecoupledConv2d, torch.nn.Conv2d),
        (3, dcnet.DecoupledConv3d, torch.nn.Conv3d),
    ]:
        arguments = (4, 6, 3, 2, 1, 1, 2)
        x = torch.randn(4, *[7, 8, 9][:dims])
        layer = kind(*arguments, operator="seg-cos").eval()
        assert layer(x).shape == plain(*arguments)(x).shape
        torch.testing.assert_close(layer(x), layer(x[None])[0])


# --- the depth of the call stack of a layer in eager mode ---


PACKAGE = str(Path(dcnet.__file__).parent)
DEEPEST = 8


def deepest_call(call):
    """The names of the frames of dcnet at the deepest point of the call."""
    now, deepest = [], []

    def profile(frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            now.append(frame.f_code.co_name)
            deepest[:] = max(deepest, now, key=len)
        elif event == "return":
            now.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return deepest


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("operator", pairwise_operators())
def test_layer_call_is_at_most_8_frames_deep(operator, training):
    images, rows = torch.rand(2, 4, 6, 6), torch.rand(3, 4)
    layers = [
        (dcnet.DecoupledConv2d(4, 6, 3, padding=1, operator=operator), images),
        (dcnet.DecoupledConv2d(4, 6, 3, 2, (2, 1), 2, 2, padding_mode="reflect", operator=operator, eps=0.0), images),
        (dcnet.DecoupledConv2d(4, 6, 3, padding="same", operator=operator, blend=0.5), images),
        (dcnet.DecoupledLinear(4, 6, operator=operator), rows),
    ]
    for layer, x in layers:
        layer(x)  # the first call loads the kernels
        frames = deepest_call(lambda layer=layer, x=x: layer.train(training)(x))
        assert 4 <= len(frames) <= DEEPEST, frames
