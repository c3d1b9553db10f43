"""Splits, datasets and proportional subsets."""

import pytest
import torch
from helpers.data_files import sentence_of
from hypothesis import given
from hypothesis import strategies as st

from dcnet.data import Dataset, Split


def split(count: int = 6, channels: int = 1, side: int = 4, classes: int = 3) -> Split:
    images = torch.arange(count * channels * side * side).remainder(251).to(torch.uint8)
    return Split(images.view(count, channels, side, side), torch.arange(count) % classes)


def test_length_and_device(device: str):
    found = split().to(device)
    assert len(found) == 6
    assert found.images.device.type == found.labels.device.type == device
    assert torch.equal(found.images.cpu(), split().images)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2).long(), "uint8 [N, C, H, W], not torch.float32 [2, 1, 4, 4]"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), "not torch.uint8 [2, 4, 4]"),
        (torch.zeros(2, 1, 4, 8).byte()[..., ::2], torch.zeros(2).long(), "images must be contiguous"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(3).long(), "labels must be int64 [2], not torch.int64 [3]"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(2).int(), "labels must be int64 [2], not torch.int32 [2]"),
    ],
)
def test_split_rejects_other_tensors(images: torch.Tensor, labels: torch.Tensor, message: str):
    assert message in sentence_of(lambda: Split(images, labels))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_subset_is_proportional(labels: list[int], data: st.DataObject):
    count = data.draw(st.integers(1, len(labels)))
    whole = Split(torch.arange(len(labels)).to(torch.uint8).view(-1, 1, 1, 1), torch.tensor(labels))
    part = whole.subset(count, 5)
    assert len(part) == count
    index = part.images.flatten().long()
    assert index.tolist() == sorted(set(index.tolist()))
    assert torch.equal(part.labels, whole.labels[index])
    for label in range(5):
        exact = labels.count(label) * count / len(labels)
        assert abs(part.labels.tolist().count(label) - exact) < 1
    again = whole.subset(count, 5)
    assert torch.equal(again.images, part.images)


def test_subset_is_random():
    whole = Split(torch.arange(200).to(torch.uint8).view(-1, 1, 1, 1), torch.arange(200) % 2)
    first, second = (whole.subset(20, 2, seed).images.flatten() for seed in (0, 1))
    assert first.max() > 100
    assert torch.equal(first, whole.subset(20, 2).images.flatten())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("count", [0, 7])
def test_subset_size_is_checked(count: int):
    with pytest.raises(ValueError, match=f"the size of a subset must be a whole number from 1 to 6, not {count}"):
        split().subset(count, 3)


def test_dataset_sizes():
    found = Dataset("mine", split(6, 3, 4), split(3, 3, 4), ("a", "b", "c"))
    assert (found.channels, found.image_size, found.num_classes) == (3, 4, 3)


def test_dataset_requires_square_images_of_one_size():
    with pytest.raises(ValueError, match=r"'mine' must be square and of one shape, not \(1, 4, 4\) and \(1, 5, 5\)"):
        Dataset("mine", split(), split(side=5), ("a", "b", "c"))
    flat = Split(torch.zeros(3, 1, 4, 5).byte(), torch.zeros(3).long())
    with pytest.raises(ValueError, match="must be square"):
        Dataset("mine", flat, flat, ("a",))


def test_dataset_requires_a_name_for_every_label():
    with pytest.raises(ValueError, match="labels of 'mine' must be from 0 to 1, at least one in each split"):
        Dataset("mine", split(), split(), ("a", "b"))
    empty = Split(torch.zeros(0, 1, 4, 4).byte(), torch.zeros(0).long())
    with pytest.raises(ValueError, match="at least one in each split"):
        Dataset("mine", split(), empty, ("a", "b", "c"))
    negative = Split(torch.zeros(1, 1, 4, 4).byte(), torch.tensor([-1]))
    with pytest.raises(ValueError, match="from 0 to 2"):
        Dataset("mine", split(), negative, ("a", "b", "c"))
