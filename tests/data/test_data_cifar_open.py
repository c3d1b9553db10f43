"""CIFAR-100 as an open set: which classes, and that they stay the same."""

from pathlib import Path

import numpy as np
import torch
from data_files import cifar_binary, pixels, sentence_of, write_files

from dcnet.data import load_dataset
from dcnet.data.cifar import CIFAR_100
from dcnet.data.cifar_open import cifar100_open

UNSEEN = (
    "camel can flatfish forest house kangaroo keyboard lawn_mower mushroom otter pickup_truck road squirrel "
    "sunflower sweet_pepper tank tulip turtle whale wolf"
)


def write_hundred(folder: Path) -> None:
    """Two images of each class to train on, and one to test with."""
    files = {"train.bin": np.arange(200) % 100, "test.bin": np.arange(100)}
    contents = {name: cifar_binary("cifar100", pixels(len(labels), 3072), labels) for name, labels in files.items()}
    write_files(folder / "cifar-100-binary", contents)


def test_eighty_classes_are_known_and_the_others_never_change(tmp_path: Path):
    write_hundred(tmp_path)
    found, parts = load_dataset("cifar100-open", tmp_path, download=False), cifar100_open(tmp_path, download=False)
    assert (found.name, found.num_classes, found.image_size) == ("cifar100-open", 80, 32)
    assert (len(found.train), len(found.test), len(parts.unseen)) == (160, 80, 60)
    assert torch.equal(found.train.images, parts.known.train.images)
    assert sorted((*found.classes, *parts.unseen_classes)) == sorted(CIFAR_100.classes)
    assert " ".join(parts.unseen_classes) == UNSEEN


def test_a_folder_without_cifar_is_told(tmp_path: Path):
    told = sentence_of(lambda: load_dataset("cifar100-open", tmp_path, download=False))
    assert told.startswith(f"cifar100 is not in {tmp_path}: expected cifar-100-binary")
