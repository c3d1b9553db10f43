"""CIFAR-100 as an open set: 80 classes to train on, and 20 that no network sees before it is tested with them."""

import dataclasses
from pathlib import Path

from dcnet.data.cifar import CIFAR_100
from dcnet.data.dataset import Dataset
from dcnet.data.open_set import OpenSet, split_classes
from dcnet.data.registry import data_folder, register

NAME = "cifar100-open"
# Which classes these are must not change from run to run.
UNSEEN, SEED = 20, 0
ABOUT = "80 classes of CIFAR-100, 40,000 + 8,000 images; the other 20 are for verification"


def cifar100_open(folder: Path | str | None = None, download: bool = True) -> OpenSet:
    """The 80 classes to train on, and all 12,000 images of the other 20; always the same classes."""
    parts = split_classes(CIFAR_100.load(data_folder(folder), download), UNSEEN, SEED)
    return dataclasses.replace(parts, known=dataclasses.replace(parts.known, name=NAME))


@register(NAME, ABOUT, CIFAR_100.files)
def load_cifar100_open(folder: Path, download: bool = True) -> Dataset:
    """The classes to train on."""
    return cifar100_open(folder, download).known
