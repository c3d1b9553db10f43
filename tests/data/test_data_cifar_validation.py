"""Training images of CIFAR-100 that are held back."""

import torch

from dcnet.data import Split
from dcnet.data.cifar_validation import held_back


def test_as_many_of_each_class_are_held_back_and_none_is_in_both():
    labels = torch.arange(60) % 3
    split = Split(torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(60, 1, 2, 2).contiguous(), labels)
    train, held = held_back(split, 3, 4)
    assert torch.bincount(held.labels).tolist() == [4, 4, 4]
    numbers = [part.images[:, 0, 0, 0].tolist() for part in (train, held)]
    assert sorted(numbers[0] + numbers[1]) == list(range(60))
    assert all(part == sorted(part) for part in numbers)
    for part, own in zip((train, held), numbers, strict=True):
        assert part.labels.tolist() == [number % 3 for number in own]
    assert torch.equal(held.images, held_back(split, 3, 4)[1].images)
    # By chance, and not the first or last of each class.
    assert numbers[1] != list(range(12))
