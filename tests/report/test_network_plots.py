"""Filters as images, and learned radii."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.report.network_plots import LINE, convolution, filter_images, learned_radii, radius_boxes


def tiles(filters: torch.Tensor) -> torch.Tensor:
    """The centers of the pixels of all filters in the picture, [rows, columns, height, width, 3]."""
    (axes,) = filter_images(filters, "title").axes
    image = torch.as_tensor(axes.get_images()[0].get_array())
    # Lines of two pixels are between the filters; the rest are repeated pixels.
    side, line = filters.shape[-1], 2
    zoom = -(-24 // side)
    step = side * zoom + line
    places = [line + zoom // 2 + zoom * i for i in range(side)]
    rows, columns = (image.shape[0] - line) // step, (image.shape[1] - line) // step
    found = [[image[r * step :, c * step :][places][:, places] for c in range(columns)] for r in range(rows)]
    return torch.stack([torch.stack(row) for row in found])


def test_filters_of_one_channel_are_gray_and_scaled_to_their_largest_weight():
    filters = torch.tensor([[1.0, -2.0], [0.5, 0.0]]).view(1, 1, 2, 2) * torch.tensor([1.0, 100.0]).view(2, 1, 1, 1)
    expected = torch.tensor([[0.75, 0.0], [0.625, 0.5]])
    found = tiles(filters)
    assert found.shape[:2] == (1, 2)
    for tile in found.flatten(0, 1):
        torch.testing.assert_close(tile, expected[..., None].expand(2, 2, 3))


def test_filters_of_three_channels_are_in_color():
    filters = torch.randn(4, 3, 3, 3)
    found = tiles(filters).flatten(0, 1)
    for tile, weights in zip(found, filters, strict=True):
        torch.testing.assert_close(tile, (weights / (2 * weights.abs().max()) + 0.5).permute(1, 2, 0))


def test_filters_of_many_channels_are_one_row_each():
    found = tiles(torch.randn(5, 8, 3, 3))
    assert found.shape[:2] == (5, 8)
    many = filter_images(torch.randn(40, 20, 3, 3), "title").axes[0].get_title()
    assert "the first 16 of 40 filters, a row each, by the first 16 of 20 channels" in many


def test_empty_tiles_have_the_color_of_the_lines():
    found = tiles(torch.randn(7, 1, 3, 3))
    assert found.shape[:2] == (2, 4)
    torch.testing.assert_close(found[1, 3], torch.tensor(LINE).expand(3, 3, 3))


def test_filter_of_zeros_is_gray():
    assert tiles(torch.zeros(1, 1, 3, 3)).unique().tolist() == [0.5]


def test_filters_are_of_the_first_or_the_named_convolution():
    model = dcnet.create_model("cnn9-small", "tanh-cos", 10, width=0.1)
    name, filters = convolution(model)
    assert name == "body.conv1.layer1.conv"
    assert filters.shape[1] == 3
    assert convolution(model, "network.body.conv2.layer1.conv")[0] == "body.conv2.layer1.conv"
    with pytest.raises(ValueError, match="--layer must be a convolution of the network, not 'nope': one of body"):
        convolution(model, "nope")
    with pytest.raises(ValueError, match="has no convolution"):
        convolution(nn.Linear(2, 2))


def network(operator: str) -> torch.nn.Module:
    return dcnet.create_model("cnn9-small", operator, 10, width=0.1)


def test_radii_are_in_the_order_of_the_layers():
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


def test_magnitudes_of_a_sum_have_separate_radii_without_fixed_ones():
    found = learned_radii(network("ball(radius=Radius(init=2.0,per_channel=False,relative=False))&tanh-cos"))
    assert [radii.layer for radii in found[:2]] == [f"body.conv1.layer1.conv, radius_{i}" for i in (0, 1)]
    assert (found[0].values, found[0].relative) == (pytest.approx([2.0]), False)
    assert len(learned_radii(network("ball(radius=2.0)&tanh-cos"))) == 10


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("conv", "a plain network has no radius"),
        ("linear-cos", "the operator 'linear-cos' has no radius"),
        ("tanh(radius=8.0)-cos", "the radius of 'tanh\\(radius=8.0\\)-cos' is fixed at 8"),
    ],
)
def test_plot_without_learned_radii_gives_the_reason(operator: str, message: str):
    with pytest.raises(ValueError, match=message):
        learned_radii(network(operator))


def test_every_layer_has_points_a_box_and_its_initial_value():
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
