"""Filters as images: scaled one by one, grey or in colour, and a row each where there are many channels."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.report.filters import LINE, convolution, filter_images


def tiles(filters: torch.Tensor) -> torch.Tensor:
    """The middles of the pixels of all filters, [rows, columns, height, width, 3], from the picture."""
    (axes,) = filter_images(filters, "title").axes
    image = torch.as_tensor(axes.get_images()[0].get_array())
    # Lines of two pixels between, and the rest is repeated pixels.
    side, line = filters.shape[-1], 2
    zoom = -(-24 // side)
    step = side * zoom + line
    places = [line + zoom // 2 + zoom * i for i in range(side)]
    rows, columns = (image.shape[0] - line) // step, (image.shape[1] - line) // step
    found = [[image[r * step :, c * step :][places][:, places] for c in range(columns)] for r in range(rows)]
    return torch.stack([torch.stack(row) for row in found])


def test_filters_of_one_channel_are_grey_and_scaled_to_their_largest_weight():
    filters = torch.tensor([[1.0, -2.0], [0.5, 0.0]]).view(1, 1, 2, 2) * torch.tensor([1.0, 100.0]).view(2, 1, 1, 1)
    expected = torch.tensor([[0.75, 0.0], [0.625, 0.5]])
    found = tiles(filters)
    assert found.shape[:2] == (1, 2)
    for tile in found.flatten(0, 1):
        torch.testing.assert_close(tile, expected[..., None].expand(2, 2, 3))


def test_filters_of_three_channels_are_in_colour():
    filters = torch.randn(4, 3, 3, 3)
    found = tiles(filters).flatten(0, 1)
    for tile, weights in zip(found, filters, strict=True):
        torch.testing.assert_close(tile, (weights / (2 * weights.abs().max()) + 0.5).permute(1, 2, 0))


def test_filters_of_more_channels_are_a_row_each():
    found = tiles(torch.randn(5, 8, 3, 3))
    assert found.shape[:2] == (5, 8)
    many = filter_images(torch.randn(40, 20, 3, 3), "title").axes[0].get_title()
    assert "the first 16 of 40 filters, a row each, by the first 16 of 20 channels" in many


def test_empty_places_have_the_colour_of_the_lines():
    found = tiles(torch.randn(7, 1, 3, 3))
    assert found.shape[:2] == (2, 4)
    torch.testing.assert_close(found[1, 3], torch.tensor(LINE).expand(3, 3, 3))


def test_a_filter_of_zeros_is_grey():
    assert tiles(torch.zeros(1, 1, 3, 3)).unique().tolist() == [0.5]


def test_the_first_convolution_is_taken_or_the_one_of_that_name():
    model = dcnet.create_model("cnn9-small", "tanh-cos", 10, width=0.1)
    name, filters = convolution(model)
    assert name == "body.conv1.layer1.conv"
    assert filters.shape[1] == 3
    assert convolution(model, "network.body.conv2.layer1.conv")[0] == "body.conv2.layer1.conv"
    with pytest.raises(ValueError, match="--layer 'nope' is no convolution of the network, whose are body"):
        convolution(model, "nope")
    with pytest.raises(ValueError, match="has no convolution"):
        convolution(nn.Linear(2, 2))
