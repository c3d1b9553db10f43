"""Shapes as text, and lower bounds computed by hand."""

import pytest

from dcnet.bench.shapes import Ceilings, Shape, Work


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
