"""Calibrated networks start with the norms of the plain network."""

import pytest
import torch
from helpers.operators import pairwise_operators
from torch import Tensor, nn

import dcnet
from dcnet.convert import decouple


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, stride=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1, padding_mode="circular", bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )


def images(count=64):
    return 2 * torch.randn(count, 3, 8, 8) + 0.5


def layer_pairs(plain, changed, x):
    """The outputs, without bias, of each plain layer and its decoupled counterpart for the same input."""
    for before, after in zip(plain, changed, strict=True):
        if isinstance(after, dcnet.layers.Decoupled):
            shape = (1, -1, *[1] * (after.weight.dim() - 2))
            bias = 0 if after.bias is None else after.bias.view(shape)
            yield before(x) - bias, after(x) - bias
        x = before(x)


def channel_norms(output):
    return output.transpose(0, 1).flatten(1).norm(dim=1)


OPERATORS = ["tanh-cos", "sphere-cos", "seg-sqcos", "ball-linear+linear", "mix-sigmoid+joint", "log&tanh-cos"]


@pytest.mark.parametrize("operator", [*OPERATORS, "tanh(radius=Radius(relative=False))-cos", "seg-sqcos+product"])
def test_every_channel_has_the_norm_of_the_plain_layer(operator):
    plain = network().eval()
    changed = decouple(plain, operator, linear=True, start="calibrated", data=[images(512), images(512)])
    with torch.no_grad():
        pairs = list(layer_pairs(plain, changed, images(1024)))
    assert len(pairs) == 4
    for before, after in pairs:
        assert (after.norm() / before.norm()).item() == pytest.approx(1, rel=0.03)
        torch.testing.assert_close(channel_norms(after), channel_norms(before), rtol=0.12, atol=0)


@pytest.mark.parametrize("operator", ["tanh-cos", "sphere-cos", "seg-sqcos"])
def test_a_calibrated_network_is_closer_to_the_plain_one_than_as_is(operator):
    plain, x = network().eval(), images(256)
    as_is = decouple(plain, operator)
    calibrated = decouple(plain, operator, start="calibrated", data=[images()])
    with torch.no_grad():
        far, near = [(model(x) - plain(x)).norm() for model in (as_is, calibrated)]
    assert near < 0.7 * far


def test_an_unweighted_linear_cosine_is_the_plain_network_once_calibrated():
    plain, x = network().double().eval(), images().double()
    changed = decouple(plain, "linear-cos", linear=True, start="calibrated", data=[x], eps=0.0)
    torch.testing.assert_close(changed(x), plain(x), rtol=1e-6, atol=1e-6)


def test_the_mean_norm_is_that_of_the_patches_and_an_absolute_radius_starts_there():
    layer, x = nn.Conv2d(3, 4, 3, padding="same", dilation=2), images()
    relative = decouple(layer, "tanh-cos", start="calibrated", data=[x[:8], x[8:]])
    trained = dcnet.DecoupledConv2d(3, 4, 3, padding="same", dilation=2, operator="tanh-cos")
    trained(x)
    torch.testing.assert_close(relative.mean_norm, trained.mean_norm)
    absolute = decouple(layer, "tanh(radius=Radius(relative=False))-cos", start="calibrated", data=[x])
    torch.testing.assert_close(absolute.constants()["radius"], trained.mean_norm.expand(4))
    fixed = decouple(layer, "tanh(radius=3.0)-cos", start="calibrated", data=[x])
    assert fixed.constants()["radius"] == 3


def test_calibration_runs_in_evaluation_mode_and_restores_the_mode():
    model = network()
    model[1].eval()
    statistics, modes = model[1].running_mean.clone(), [module.training for module in model.modules()]
    changed = decouple(model, "tanh-cos", start="calibrated", data=(batch for batch in [(images(), 1)]), inplace=True)
    assert changed is model
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].running_mean, statistics)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(value.requires_grad for value in model.parameters())


def test_dead_filters_and_unreached_layers_keep_their_initial_constants():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.unused = nn.Conv2d(3, 4, 3)
    model.forward = lambda x: model[0](x)
    with torch.no_grad():
        model[0].weight[1] = 0
    reports = []
    decouple(model, "tanh-cos", start="calibrated", data=[images()], report=reports.append, inplace=True)
    assert model[0].constants()["scale"][1].item() == pytest.approx(1)
    assert model.unused.mean_norm == 0
    assert [row.note for row in reports[0].rows] == ["calibrated", "not reached by the data"]


def test_data_is_required_for_calibration_only():
    with pytest.raises(ValueError, match="requires data"):
        decouple(network(), "tanh-cos", start="calibrated")
    with pytest.raises(ValueError, match="start='as-is' does not use data"):
        decouple(network(), "tanh-cos", data=[images()])
    with pytest.raises(ValueError, match="at least one batch"):
        decouple(network(), "tanh-cos", start="calibrated", data=[])
    with pytest.raises(TypeError, match="a tensor or a tuple that starts with one, not int"):
        decouple(network(), "tanh-cos", start="calibrated", data=[3])


class Once:
    """Batches that can be read only once, as from a stream."""

    def __init__(self):
        self.batches = iter([images()])

    def __iter__(self):
        return self.batches


def test_data_that_can_be_read_only_once_is_rejected():
    with pytest.raises(ValueError, match=r"read twice and had no batches the second time: give a list"):
        decouple(network(), "tanh-cos", start="calibrated", data=Once())
    decouple(network(), "tanh-cos", start="calibrated", data=iter(Once()))


def test_data_that_is_not_finite_is_rejected():
    for bad in (torch.nan, torch.inf):
        poisoned = images()
        poisoned[0, 0, 0, 0] = bad
        with pytest.raises(ValueError, match="leads to a patch norm that is not finite"):
            decouple(network(), "tanh-cos", start="calibrated", data=[images(), poisoned])
    with pytest.raises(TypeError, match=r"a list of batches, not one tensor: give \[x\]"):
        decouple(network(), "tanh-cos", start="calibrated", data=images())


def test_an_error_leaves_the_network_as_it_was():
    model = decouple(network(), "ball-cos", include="3")
    text, state = repr(model), model.state_dict()
    with pytest.raises(ValueError, match="must have 3 channels"):
        decouple(model, "tanh-cos", start="calibrated", data=[torch.zeros(1, 5, 8, 8)], inplace=True)
    assert repr(model) == text
    assert all(module.training and not module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def own(n):
    return n.sqrt()


def test_only_operators_without_a_scale_are_rejected():
    data = [images(4)]
    for operator in (dcnet.Operator(own), dcnet.Operator(dcnet.magnitude.Tanh() + dcnet.magnitude.Custom(own))):
        with pytest.raises(ValueError, match="cannot be calibrated, since no constant"):
            decouple(network(), operator, start="calibrated", data=data)
    scaled = [op for op in pairwise_operators() if "scale" in dcnet.Operator.parse(op).slots]
    assert len(scaled) > 40
    for operator in scaled:
        layer = decouple(nn.Conv2d(3, 4, 3), operator, start="calibrated", data=data)
        assert all(value.isfinite().all() for value in layer.state_dict().values()), operator


def test_calibration_with_one_row():
    model = decouple(nn.Linear(4, 3), "tanh-cos", linear=True, start="calibrated", data=[torch.randn(4)])
    assert model(torch.randn(4)).shape == (3,)


def test_any_error_restores_the_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(TypeError, match="must be a tensor or a tuple that starts with one"):
        decouple(model, "tanh-cos", start="calibrated", data=[{"x": 1}], inplace=True)
    assert type(model[0]) is nn.Conv2d
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("eps", [1e-4, 4.0])
def test_a_calibrated_mean_norm_is_that_of_training(mode, eps):
    plain, x = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), 3 + torch.rand(4, 2, 5, 5)
    layer = decouple(plain, "tanh-cos", start="calibrated", data=[x], eps=eps)
    calibrated = layer.mean_norm.clone()
    layer.reset_constants()
    layer(x)
    torch.testing.assert_close(calibrated, layer.mean_norm)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)])
def test_a_calibrated_mean_norm_has_the_eps_of_the_layer(layer):
    x = torch.zeros(5, 3) if isinstance(layer, nn.Linear) else torch.zeros(5, 3, 2)
    found = decouple(layer, "tanh-cos", linear=True, start="calibrated", data=[x], eps=9.0)
    assert found.mean_norm == 3


def test_a_calibrated_start_leaves_relative_radii():
    x = 100 * torch.randn(8, 3)
    layer = decouple(nn.Linear(3, 4), "tanh-cos", linear=True, start="calibrated", data=[x])
    torch.testing.assert_close(layer.constants()["radius"], torch.ones(4))


def test_a_calibrated_scale_can_still_be_learned():
    plain = nn.Linear(3, 4, bias=False)
    nn.init.constant_(plain.weight, 1e-9)
    layer = decouple(plain, "sphere-cos", linear=True, start="calibrated", data=[torch.rand(8, 3)], eps=0)
    assert layer.scale.min() > 0


def test_a_channel_without_output_keeps_its_scale():
    plain = nn.Linear(3, 4, bias=False)
    nn.init.constant_(plain.weight, -1.0)
    layer = decouple(plain, "sphere-relucos", linear=True, start="calibrated", data=[torch.rand(8, 3)])
    torch.testing.assert_close(layer.constants()["scale"], torch.ones(4))


def test_a_scale_keeps_its_floor():
    data = [torch.rand(8, 3)]
    operator = "sphere(scale=Learnable(init=2,floor=0.01))-cos"
    layer = decouple(nn.Linear(3, 4), operator, linear=True, start="calibrated", data=data)
    assert str(layer.operator) == "sphere(scale=Learnable(init=2,per_channel=True,floor=0.01))-cos"


def test_another_angle_is_calibrated_though_the_magnitude_is_that_of_a_plain_layer():
    data, plain = [torch.randn(50, 3)], nn.Linear(3, 4, bias=False)
    layer = decouple(plain, "linear-sqcos+linear", linear=True, start="calibrated", data=data)
    torch.testing.assert_close(layer(data[0]).norm(dim=0), plain(data[0]).norm(dim=0))


def test_hooks_see_the_values_of_the_plain_network():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(8, 3)
    model[0].register_forward_hook(lambda layer, args, output: 10 * output)
    expected = (10 * nn.functional.linear(x, model[0].weight, model[0].bias)).norm(dim=1).mean()
    found = decouple(model, "tanh-cos", linear=True, start="calibrated", data=[x])
    torch.testing.assert_close(found[1].mean_norm, expected, rtol=1e-4, atol=0)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


def test_layers_that_are_called_by_name_are_calibrated():
    found = decouple(ByName(), "tanh-cos", linear=True, start="calibrated", data=[torch.randn(8, 3)])
    assert found.layer.mean_norm > 0
