"""The radii that layers have learned."""

import pytest
import torch

import dcnet
from dcnet.report.radii import learned_radii, radius_boxes


def network(operator: str) -> torch.nn.Module:
    return dcnet.create_model("cnn9-small", operator, 10, width=0.1)


def test_the_radii_are_those_of_the_layers_in_the_order_of_depth():
    model = network("tanh-cos")
    layer = model.get_submodule("body.conv2.layer1.conv")
    with torch.no_grad():
        layer.radius.copy_(torch.arange(len(layer.radius)) + 1.0)
    found = learned_radii(model)
    assert [radii.layer for radii in found][:4] == [
        f"body.conv{i}.layer{j}.conv" for i, j in ((1, 1), (1, 2), (1, 3), (2, 1))
    ]
    assert len(found) == 10
    assert found[3].values == pytest.approx([(i + 1) ** 2 + 1e-4 for i in range(len(layer.radius))])
    assert found[0].values == pytest.approx([1.0] * len(found[0].values))
    assert (found[0].start, found[0].relative) == (1.0, True)


def test_parts_of_a_sum_have_radii_of_their_own_and_fixed_ones_are_left_out():
    found = learned_radii(network("ball(radius=Radius(init=2.0,per_channel=False,relative=False))&tanh-cos"))
    assert [radii.layer for radii in found[:2]] == [f"body.conv1.layer1.conv, radius_{i}" for i in (0, 1)]
    assert (found[0].values, found[0].relative) == (pytest.approx([2.0]), False)
    assert len(learned_radii(network("ball(radius=2.0)&tanh-cos"))) == 10


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("conv", "the network is a plain one, which has no radius"),
        ("linear-cos", "the operator 'linear-cos' has no radius"),
        ("tanh(radius=8.0)-cos", "the radius of 'tanh\\(radius=8.0\\)-cos' is fixed at 8"),
    ],
)
def test_where_nothing_is_learned_it_says_why(operator: str, message: str):
    with pytest.raises(ValueError, match=message):
        learned_radii(network(operator))


def test_every_layer_has_its_points_its_box_and_its_start():
    found = learned_radii(network("tanh-cos"))
    (axes,) = radius_boxes(found, "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [radii.layer for radii in found]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    points = [line for line in axes.get_lines() if line.get_marker() == "."]
    assert [list(line.get_xdata()) for line in points] == [radii.values for radii in found]
    starts = [line for line in axes.get_lines() if line.get_color() == "tab:red"]
    assert [set(line.get_xdata()) for line in starts] == [{1.0}] * len(found)
    assert "multiples of the mean patch norm" in axes.get_xlabel()


def test_absolute_radii_are_norms():
    figure = radius_boxes(learned_radii(network("tanh(radius=Radius(relative=False))-cos")), "title")
    assert figure.axes[0].get_xlabel().endswith("norm of a patch")
