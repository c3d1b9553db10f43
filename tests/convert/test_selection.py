"""The selection of the layers to convert, and the reasons why others stay."""

import pytest
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import dcnet
from dcnet.convert import Choice, decouple, plan
from dcnet.convert.selection import is_depthwise, is_shortcut
from dcnet.layers import Decoupled


def test_groups_alone_do_not_make_a_layer_depthwise():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 3, groups=8))
    changed = decouple(model, "tanh-cos", depthwise=False)
    assert [isinstance(layer, Decoupled) for layer in changed] == [True, False, False]


def test_a_single_channel_is_not_depthwise():
    assert is_depthwise(nn.Conv2d(4, 8, 3, groups=4))
    assert not is_depthwise(nn.Conv2d(1, 8, 3))


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("block.downsample.0", nn.Conv2d(3, 4, 1), True),
        ("block.Shortcut", nn.Conv2d(3, 4, 1, stride=2), True),
        ("block.downsample.0", nn.Conv2d(3, 4, 3), False),
        ("block.downsample.0", nn.Linear(3, 4), False),
        ("block.conv1", nn.Conv2d(3, 4, 1), False),
    ],
)
def test_shortcuts_are_1x1_convolutions_with_matching_names(name, layer, expected):
    assert is_shortcut(name, layer) is expected


def test_the_projection_of_attention_stays_even_if_its_class_is_listed():
    attention = nn.MultiheadAttention(8, 2)
    found = plan(attention, "tanh-cos", Choice(linear=True, also=[NonDynamicallyQuantizableLinear]))
    assert found.left["out_proj"] == "nn.MultiheadAttention uses its weight without calling it"


def test_the_shape_of_a_transposed_convolution_is_that_of_its_weight():
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    (row,) = plan(layer, "tanh-cos").rows
    assert row.shape == "x".join(map(str, layer.weight.shape))


class DoubledConv(dcnet.DecoupledConv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_decoupled_layer_with_another_forward_stays():
    assert "DoubledConv may compute something else" in plan(nn.Sequential(DoubledConv(3, 4, 3)), "ball-cos").left["0"]


def test_a_layer_in_several_places_is_chosen_by_each_of_its_names():
    shared = nn.Conv2d(3, 3, 1)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared, nn.Conv2d(3, 3, 3))})
    assert plan(model, "tanh-cos", Choice(include="decoder.0")).changed == ["encoder.0"]
    assert plan(model, "tanh-cos", Choice(include="encoder.*")).changed == ["encoder.0"]
    assert plan(model, "tanh-cos", Choice(exclude="decoder.0")).changed == ["decoder.1"]
    assert plan(model, "tanh-cos", Choice(exclude="encoder.*")).changed == ["decoder.1"]
    model["shortcut"] = shared
    assert plan(model, "tanh-cos", Choice(shortcuts=False)).changed == ["decoder.1"]
