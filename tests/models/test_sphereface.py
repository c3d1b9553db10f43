"""The networks of SphereFace: their table, any input size, plain and decoupled."""

import pytest
import torch
from torch import nn

import dcnet

CONVOLUTIONS = {"sphereface20": (3, 5, 9, 3), "sphereface36": (5, 9, 17, 5), "sphereface64": (7, 17, 33, 7)}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("operator", ["conv", "tanh-cos"])
def test_convolutions_of_each_stage(name, operator):
    with torch.device("meta"):
        model = dcnet.create_model(name, operator, 10, image_size=96)
    stages = [model.body.get_submodule(f"conv{i}") for i in (1, 2, 3, 4)]
    found = [[module for module in stage.modules() if isinstance(module, nn.Conv2d)] for stage in stages]
    assert tuple(map(len, found)) == CONVOLUTIONS[name]
    assert [layers[-1].out_channels for layers in found] == [64, 128, 256, 512]
    strides = [[layer.stride[0] for layer in layers] for layers in found]
    assert all(stage[0] == 2 and set(stage[1:]) == {1} for stage in strides)
    assert all(isinstance(layer, dcnet.DecoupledConv2d) == (operator != "conv") for layers in found for layer in layers)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert sum(isinstance(module, nn.PReLU) for module in model.modules()) == sum(CONVOLUTIONS[name])
    assert model.num_features == model.body.dense.out_features == 512
    assert model.body.dense.in_features == 512 * 6 * 6


@pytest.mark.parametrize("size", [16, 33, 112])
def test_any_input_size(size):
    model = dcnet.create_model("sphereface20", "tanh-cos", 7, width=0.1, image_size=size)
    x = torch.randn(2, 3, size, size)
    assert model.features(x).shape == (2, model.num_features)
    model(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_units_add_to_their_input():
    """With zero filters a unit is the identity."""
    model = dcnet.create_model("sphereface20", "conv", 7, width=0.1, image_size=16)
    unit = model.body.conv2.unit2
    x = torch.randn(2, unit.first.conv.in_channels, 5, 5)
    assert not torch.equal(unit(x), x)
    nn.init.zeros_(unit.second.conv.weight)
    assert torch.equal(unit(x), x)


def test_features_have_no_activation():
    torch.manual_seed(0)
    model = dcnet.create_model("sphereface20", "conv", 0, width=0.1, image_size=16)
    found = model(torch.randn(8, 3, 16, 16))
    assert (found < 0).any()
    assert (found > 0).any()


def test_other_image_sizes_are_rejected():
    model = dcnet.create_model("sphereface20", "conv", 7, width=0.1, image_size=32)
    with pytest.raises(ValueError, match="image_size=32 does not fit"):
        model(torch.randn(1, 3, 64, 64))


def test_a_margin_head_can_be_trained():
    torch.manual_seed(0)
    model = dcnet.create_model("sphereface20", "tanh-cos", 0, width=0.1, image_size=16)
    head = dcnet.losses.MarginSoftmax(model.num_features, 3, "a-softmax")
    x, labels = torch.randn(12, 3, 16, 16), torch.arange(12) % 3
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = head(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_both_convolutions_of_a_unit_start_small_and_the_others_do_not():
    torch.manual_seed(0)
    model = dcnet.create_model("sphereface20", "conv", 10, width=0.5)
    units = [module for name, module in model.named_modules() if name.split(".")[-1].startswith("unit")]
    filters = [unit.get_submodule(part).conv.weight for unit in units for part in ("first", "second")]
    assert all(abs(weight.std() - 0.01) < 0.001 for weight in filters)
    assert all(model.body.get_submodule(f"conv{i}").lead.conv.weight.std() > 0.015 for i in (1, 2, 3, 4))
