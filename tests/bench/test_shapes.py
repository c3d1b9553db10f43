"""Shapes as text, and lower bounds computed by hand."""

import pytest
from torch import nn

from dcnet import DecoupledAttention, DecoupledConv1d, DecoupledConv3d, DecoupledLinear
from dcnet.bench.shapes import (
    SETS,
    AttentionShape,
    Ceilings,
    LinearShape,
    SequenceShape,
    Shape,
    VolumeShape,
    Work,
    expand_shapes,
    parse_shape,
)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("N512xC64x32", Shape(512, 64, 32, 32)),
        ("n8xc3x32x48", Shape(8, 3, 32, 48)),
        ("N8xC3x32xK5", Shape(8, 3, 32, 32, 5)),
        ("N8xC3x32x48xK1", Shape(8, 3, 32, 48, 1)),
    ],
)
def test_shapes_round_trip(text: str, shape: Shape):
    assert Shape.parse(text) == shape
    assert Shape.parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["512x64x32", "N512C64x32", "N512xC64", "", "N512xC64x32x32x32", "N-1xC2x3"])
def test_invalid_shapes_are_rejected_with_an_example(text: str):
    with pytest.raises(ValueError, match="write N512xC64x32 for 512 images of 64 channels and 32x32 pixels") as error:
        Shape.parse(text)
    assert repr(text) in str(error.value)


def test_impossible_shapes_are_rejected():
    with pytest.raises(ValueError, match="1 or more, not 'N0xC64x32'"):
        Shape.parse("N0xC64x32")
    with pytest.raises(ValueError, match=r"filter size after K must be odd.*'N1xC2x4xK2'"):
        Shape.parse("N1xC2x4xK2")


def test_work_of_a_shape_by_hand():
    shape = Shape(batch=2, channels=4, height=6, width=5)
    # 2 * 4 * 6 * 5 = 240 values of an image batch, 4 * 4 * 3 * 3 = 144 of filters, two bytes each.
    assert shape.forward(itemsize=2) == Work(bytes=2 * (240 + 144 + 240), flops=2 * 2 * 6 * 5 * 4 * 4 * 9)
    assert shape.backward(itemsize=2) == Work(bytes=2 * (240 + 144 + 240 + 240 + 144), flops=4 * 2 * 6 * 5 * 4 * 4 * 9)


def test_the_slower_ceiling_determines_the_floor():
    # 1 MB at 1 GB/s takes 1 ms, 4 MFLOP at 1 GFLOP/s take 4 ms.
    assert Work(10**6, 4 * 10**6).floor_ms(Ceilings(1e9, 1e9)) == pytest.approx(4)
    assert Work(10**6, 4 * 10**6).floor_ms(Ceilings(1e9, 1e12)) == pytest.approx(1)


def test_the_training_floor_includes_the_backward_pass():
    shape = Shape(2, 4, 6, 5)
    moving = Ceilings(bytes_per_s=1e6, flops_per_s=1e15)
    assert shape.floors(4, moving) == pytest.approx({"forward": 2.496, "training": 2.496 + 4.032})
    computing = Ceilings(bytes_per_s=1e15, flops_per_s=1e6)
    assert shape.floors(4, computing) == pytest.approx({"forward": 17.28, "training": 3 * 17.28})


KINDS = {
    "N8xC6x32xK5xG3": Shape(8, 6, 32, 32, 5, 3),
    "N8xC4x6x7xG4": Shape(8, 4, 6, 7, groups=4),
    "N2xC4xL9": SequenceShape(2, 4, 9),
    "N2xC4xL9xK5xG2": SequenceShape(2, 4, 9, 5, 2),
    "N2xC4xD3x6": VolumeShape(2, 4, 3, 6, 6),
    "N2xC4xD3x6x7xK1": VolumeShape(2, 4, 3, 6, 7, 1),
    "M50x3-4": LinearShape(50, 3, 4),
    "B2xH3xT5xD4": AttentionShape(2, 3, 5, 4),
}


@pytest.mark.parametrize(("text", "shape"), KINDS.items())
def test_shapes_of_every_kind_round_trip(text: str, shape: Shape):
    assert parse_shape(text.lower()) == shape
    assert str(shape) == text


@pytest.mark.parametrize("text", ["M5x3", "M5x3-", "B1xH2xT3", "N2xC4xL9xL9", "N2xC4xD3", "linears", "N1xC2x3xG2xK3"])
def test_unknown_shapes_are_rejected_with_the_sets(text: str):
    with pytest.raises(ValueError, match="or a set: linear, depthwise, pointwise, attention") as error:
        parse_shape(text)
    assert str(error.value).startswith(f"unknown shape {text!r}: ")


@pytest.mark.parametrize("text", ["M0x3-4", "B1xH0xT1xD1", "N1xC2xL0", "N1xC2xD0x3", "N1xC2x4xG0"])
def test_sizes_of_zero_are_rejected(text: str):
    with pytest.raises(ValueError, match=f"1 or more, not '{text}'"):
        parse_shape(text)


@pytest.mark.parametrize(("text", "message"), [("N1xC6x4xG4", "G must divide"), ("N1xC2xL4xK2", "K must be odd")])
def test_groups_and_filters_must_fit(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_layers_and_their_twins():
    found = {text: (type(shape.make("conv")), type(shape.make("sphere-cos"))) for text, shape in KINDS.items()}
    assert found["N2xC4xL9"] == (nn.Conv1d, DecoupledConv1d)
    assert found["N2xC4xD3x6"] == (nn.Conv3d, DecoupledConv3d)
    assert found["M50x3-4"] == (nn.Linear, DecoupledLinear)
    assert found["B2xH3xT5xD4"][1] is DecoupledAttention
    grouped = KINDS["N8xC6x32xK5xG3"].make("tanh-cos")
    assert (grouped.groups, grouped.kernel_size, grouped.padding) == (3, (5, 5), (2, 2))


def test_work_of_other_kinds_by_hand():
    # 8 rows of 3 values, 12 filters' values, 8 rows of 4 values; two operations per product.
    assert LinearShape(8, 3, 4).forward(1) == Work(24 + 12 + 32, 2 * 8 * 12)
    # A filter of a group sees a half of the four channels.
    assert SequenceShape(2, 4, 9, 3, 2).forward(1) == Work(72 + 4 * 2 * 3 + 72, 2 * 72 * 2 * 3)
    assert VolumeShape(1, 2, 3, 4, 5).forward(1).flops == 2 * 120 * 2 * 27
    # 120 values each of query, key, value and output; 5 x 5 scores for each of 6 heads, from and to 4 features.
    attention = AttentionShape(2, 3, 5, 4)
    assert attention.forward(2) == Work(2 * 4 * 120, 2 * 2 * 6 * 25 * 4)
    assert attention.backward(2) == Work(2 * 7 * 120, 2 * attention.forward(2).flops)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sets_expand_to_shapes_of_their_kind(device: str):
    kinds = {"linear": LinearShape, "depthwise": Shape, "pointwise": Shape, "attention": AttentionShape}
    assert list(SETS) == list(kinds)
    for name, kind in kinds.items():
        shapes = [parse_shape(text) for text in expand_shapes([name], device)]
        assert {type(shape) for shape in shapes} == {kind}
        assert name != "depthwise" or all(shape.groups == shape.channels for shape in shapes)
        assert name != "pointwise" or all(shape.kernel == 1 for shape in shapes)


def test_expanded_shapes_have_no_duplicates():
    found = expand_shapes(["pointwise", "n8xc128x14x14xk1", "N2xC4xL9"], "cpu")
    assert found == ["N8xC128x14xK1", "N2xC4xL9"]
    assert "M50432x384-1536" in expand_shapes(["linear"], "cuda")


def test_attention_supports_no_relative_radius():
    shape = AttentionShape(2, 3, 5, 4)
    assert "relative to the mean norm" in shape.obstacle("tanh-cos")
    assert shape.obstacle("sphere-cos") == shape.obstacle("tanh(radius=2.0)-cos") == ""
    assert LinearShape(2, 3, 4).obstacle("tanh-cos") == ""
