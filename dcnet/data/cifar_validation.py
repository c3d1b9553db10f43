"""CIFAR-100 with a part of its training images to choose recipes by, so that the test set is left for the end."""

from pathlib import Path

import torch

from dcnet.data.cifar import CIFAR_100
from dcnet.data.dataset import Dataset, Split
from dcnet.data.order import seeded
from dcnet.data.registry import register

NAME = "cifar100-validation"
# Which images these are must not change from run to run.
HELD_BACK, SEED = 50, 0
ABOUT = "the training images of CIFAR-100 alone, 45,000 + 5,000, to choose recipes by"


@register(NAME, ABOUT, CIFAR_100.files)
def load_cifar100_validation(folder: Path, download: bool = True) -> Dataset:
    """50 training images of each class, always the same, take the place of the test set."""
    whole = CIFAR_100.load(folder, download)
    train, held = held_back(whole.train, len(whole.classes), HELD_BACK)
    return Dataset(NAME, train, held, whole.classes)


def held_back(split: Split, classes: int, count: int) -> tuple[Split, Split]:
    """All images but `count` of each class, drawn by chance, and these; both in their old order."""
    order = torch.randperm(len(split), generator=seeded(SEED, 0))
    labels = split.labels[order]
    drawn = torch.cat([order[labels == label][:count] for label in range(classes)])
    held = torch.zeros(len(split), dtype=torch.bool)
    held[drawn] = True
    parts = [Split(split.images[kept].contiguous(), split.labels[kept]) for kept in (~held, held)]
    return parts[0], parts[1]
