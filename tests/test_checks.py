"""Checks of arguments: accepted values, and error messages."""

import numpy as np
import pytest
import torch

from dcnet.checks import (
    check_choice,
    check_flag,
    check_images,
    check_labels,
    check_number,
    check_tensor,
    check_whole,
)


@pytest.mark.parametrize(
    ("limits", "value", "message"),
    [
        ({}, float("nan"), "x must be finite, not nan"),
        ({}, 10**400, "x must be finite, not an integer of 401 digits"),
        ({"above": 0}, 0, "x must be positive, not 0"),
        ({"above": 2}, 2, "x must be above 2, not 2"),
        ({"least": 0}, -1, "x must not be negative, not -1"),
        ({"least": 1}, 0, "x must be 1 or more, not 0"),
        ({"most": 1}, 2, "x must be 1 or less, not 2"),
        ({"below": 1}, 1, "x must be below 1, not 1"),
        ({"least": 0, "below": 1}, 1.0, r"x must be in \[0, 1\), not 1.0"),
        ({"above": 0, "most": 1}, 0, r"x must be in \(0, 1\], not 0"),
    ],
)
def test_number_outside_its_limits_raises(limits, value, message):
    with pytest.raises(ValueError, match=message):
        check_number("x", value, **limits)


def test_number_within_its_limits_passes():
    check_number("x", np.float32(0.5), above=0, below=1)
    check_number("x", 1, least=1, most=1)
    for value in (True, "1", None, torch.ones(())):
        with pytest.raises(TypeError, match="x must be a number, not"):
            check_number("x", value)


def test_whole_numbers():
    assert check_whole("n", np.int64(3), least=3) == 3
    assert type(check_whole("n", np.int64(3))) is int
    for value in (0, 1.0, True, "1", None):
        with pytest.raises(ValueError, match="n must be a whole number, 1 or more, not"):
            check_whole("n", value, least=1)
    with pytest.raises(ValueError, match="n must be a whole number from 1 to 5, not 6"):
        check_whole("n", 6, least=1, most=5)


def test_flags_choices_and_tensors():
    check_flag("f", True)
    check_choice("norm", "l2", ("linf", "l2"))
    check_tensor("x", torch.ones(1))
    with pytest.raises(TypeError, match="f must be True or False, not 1"):
        check_flag("f", 1)
    with pytest.raises(ValueError, match="unknown norm 'l1': known are linf, l2"):
        check_choice("norm", "l1", ("linf", "l2"))
    with pytest.raises(TypeError, match="x must be a tensor, not list: use"):
        check_tensor("x", [1])


def test_images_become_floats_in_0_to_1():
    assert torch.equal(check_images(torch.tensor([[0, 255]], dtype=torch.uint8)), torch.tensor([[0.0, 1.0]]))
    assert check_images(torch.rand(2, 3, dtype=torch.float64)).dtype == torch.float64
    assert check_images(torch.tensor([[1 + 1e-5]])).item() == 1
    for images, message in (
        (torch.rand(3), r"images must be \[N, ...\], not \[3\]"),
        (torch.rand(0, 3), "there are no images"),
        (torch.tensor([[0.0], [torch.nan]]), "image 1 has a pixel that is NaN; 1 of 2 images have one"),
        (torch.tensor([[2.0]]), "images must be uint8, or float in .* from 2 to 2: normalize inside the model"),
    ):
        with pytest.raises(ValueError, match=message):
            check_images(images)


def test_labels_are_checked_against_the_classes():
    labels = torch.tensor([0, 2], dtype=torch.uint8)
    assert check_labels("labels", labels, 2, 3).dtype == torch.int64
    assert len(check_labels("labels", labels[:0], 0, 3)) == 0
    for wrong, message in (
        (labels.float(), r"labels must be integers \[2\], one per image, not torch.float32 \[2\]"),
        (labels[:1], "labels must be integers"),
        (torch.tensor([0, 3]), "labels must be from 0 to 2, as there are 3 classes, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check_labels("labels", wrong, 2, 3)
