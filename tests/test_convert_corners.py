"""Corners of which layers are changed, of what a calibrated start sets, and of a gradual one."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import dcnet
from dcnet.convert import BlendSchedule, Choice, plan
from dcnet.convert.choice import is_depthwise, is_shortcut


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
def test_shortcuts_are_1x1_convolutions_of_such_a_name(name, layer, expected):
    assert is_shortcut(name, layer) is expected


def test_a_single_channel_is_not_depthwise():
    assert is_depthwise(nn.Conv2d(4, 8, 3, groups=4))
    assert not is_depthwise(nn.Conv2d(1, 8, 3))


def test_the_projection_of_attention_is_left_even_where_its_class_is_named():
    attention = nn.MultiheadAttention(8, 2)
    found = plan(attention, "tanh-cos", Choice(linear=True, also=[NonDynamicallyQuantizableLinear]))
    assert found.left["out_proj"] == "nn.MultiheadAttention uses its weight without calling it"


def test_the_shape_of_a_transposed_convolution_is_that_of_its_weight():
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    (row,) = plan(layer, "tanh-cos").rows
    assert row.shape == "x".join(map(str, layer.weight.shape))


class Doubled(dcnet.DecoupledConv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_decoupled_layer_with_a_forward_of_its_own_is_left():
    assert "Doubled may compute something else" in plan(nn.Sequential(Doubled(3, 4, 3)), "ball-cos").left["0"]


def test_any_error_gives_the_layers_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(TypeError, match="must be a tensor or a tuple that starts with one"):
        dcnet.decouple(model, "tanh-cos", start="calibrated", data=[{"x": 1}], inplace=True)
    assert type(model[0]) is nn.Conv2d
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("eps", [1e-4, 4.0])
def test_a_calibrated_mean_norm_is_that_of_training(mode, eps):
    plain, x = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), 3 + torch.rand(4, 2, 5, 5)
    layer = dcnet.decouple(plain, "tanh-cos", start="calibrated", data=[x], eps=eps)
    calibrated = layer.mean_norm.clone()
    layer.reset_constants()
    layer(x)
    torch.testing.assert_close(calibrated, layer.mean_norm)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)])
def test_a_calibrated_mean_norm_has_the_eps_of_the_layer(layer):
    x = torch.zeros(5, 3) if isinstance(layer, nn.Linear) else torch.zeros(5, 3, 2)
    found = dcnet.decouple(layer, "tanh-cos", linear=True, start="calibrated", data=[x], eps=9.0)
    assert found.mean_norm == 3


def test_a_calibrated_start_leaves_relative_radii():
    x = 100 * torch.randn(8, 3)
    layer = dcnet.decouple(nn.Linear(3, 4), "tanh-cos", linear=True, start="calibrated", data=[x])
    torch.testing.assert_close(layer.constants()["radius"], torch.ones(4))


def test_a_calibrated_scale_can_still_be_learned():
    plain = nn.Linear(3, 4, bias=False)
    nn.init.constant_(plain.weight, 1e-9)
    layer = dcnet.decouple(plain, "sphere-cos", linear=True, start="calibrated", data=[torch.rand(8, 3)], eps=0)
    assert layer.scale.min() > 0


def test_a_channel_without_output_keeps_its_scale():
    plain = nn.Linear(3, 4, bias=False)
    nn.init.constant_(plain.weight, -1.0)
    layer = dcnet.decouple(plain, "sphere-relucos", linear=True, start="calibrated", data=[torch.rand(8, 3)])
    torch.testing.assert_close(layer.constants()["scale"], torch.ones(4))


def test_a_scale_keeps_its_floor():
    data = [torch.rand(8, 3)]
    operator = "sphere(scale=Learnable(init=2,floor=0.01))-cos"
    layer = dcnet.decouple(nn.Linear(3, 4), operator, linear=True, start="calibrated", data=data)
    assert str(layer.operator) == "sphere(scale=Learnable(init=2,per_channel=True,floor=0.01))-cos"


def test_another_angle_is_calibrated_though_the_magnitude_is_that_of_a_plain_layer():
    data, plain = [torch.randn(50, 3)], nn.Linear(3, 4, bias=False)
    layer = dcnet.decouple(plain, "linear-sqcos+linear", linear=True, start="calibrated", data=data)
    torch.testing.assert_close(layer(data[0]).norm(dim=0), plain(data[0]).norm(dim=0))


def test_hooks_of_the_network_see_what_they_see_in_the_plain_one():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(8, 3)
    model[0].register_forward_hook(lambda layer, args, output: 10 * output)
    expected = (10 * nn.functional.linear(x, model[0].weight, model[0].bias)).norm(dim=1).mean()
    found = dcnet.decouple(model, "tanh-cos", linear=True, start="calibrated", data=[x])
    torch.testing.assert_close(found[1].mean_norm, expected, rtol=1e-4, atol=0)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


def test_layers_that_are_called_by_name_are_calibrated():
    found = dcnet.decouple(ByName(), "tanh-cos", linear=True, start="calibrated", data=[torch.randn(8, 3)])
    assert found.layer.mean_norm > 0


def test_a_schedule_begins_at_once_and_ends_at_its_end():
    model = dcnet.decouple(nn.Sequential(nn.Linear(3, 4)), "tanh-cos", linear=True, blend=0.0)
    schedule = BlendSchedule(model, steps=10, start=0.25)
    assert model[0].blend == 0.25
    schedule.load_state_dict({"taken": 30})
    assert model[0].blend == 1
    schedule.load_state_dict({"taken": -1})
    assert model[0].blend == 0.25


def test_a_layer_in_several_places_is_chosen_by_each_of_its_names():
    shared = nn.Conv2d(3, 3, 1)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared, nn.Conv2d(3, 3, 3))})
    assert plan(model, "tanh-cos", Choice(include="decoder.0")).changed == ["encoder.0"]
    assert plan(model, "tanh-cos", Choice(include="encoder.*")).changed == ["encoder.0"]
    assert plan(model, "tanh-cos", Choice(exclude="decoder.0")).changed == ["decoder.1"]
    assert plan(model, "tanh-cos", Choice(exclude="encoder.*")).changed == ["decoder.1"]
    model["shortcut"] = shared
    assert plan(model, "tanh-cos", Choice(shortcuts=False)).changed == ["decoder.1"]
