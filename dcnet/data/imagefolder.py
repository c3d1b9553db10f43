"""Folders in the layout of ImageNet: train/<class>/*.jpg and val/<class>/*.jpg."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dcnet.data.decode import Files
from dcnet.data.download import ELSEWHERE
from dcnet.data.folder import FolderDataset
from dcnet.data.registry import register

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


@register("imagefolder", "your own images, or ImageNet: train/<class>/*.jpg and val/<class>/*.jpg, read while training")
def load_image_folder(folder: Path, download: bool = False) -> FolderDataset:
    """The images of the folder, or of imagenet or imagefolder in it; there is nothing to download."""
    root = image_root(folder) or folder
    train = _part(root, "train")
    test = _part(root, "val", "test")
    classes = _classes(train)
    return FolderDataset("imagefolder", scan(train, classes), scan(test, classes), tuple(classes))


def image_root(folder: Path) -> Path | None:
    """The folder with images to train on: the one given, or imagenet or imagefolder in it."""
    roots = (folder, folder / "imagenet", folder / "imagefolder")
    return next((root for root in roots if (root / "train").is_dir()), None)


def _part(root: Path, *names: str) -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = " or ".join(f"{name}/<class>/*.jpg" for name in names)
    raise ValueError(f"imagefolder is not in {root}: expected {expected} there; {ELSEWHERE}")


def _classes(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def scan(folder: Path, classes: Sequence[str]) -> Files:
    """The images of all classes, sorted by name."""
    found = _classes(folder)
    strange = sorted(set(found) - set(classes))
    if not found or strange:
        problem = f"the class {strange[0]!r} is not in train" if strange else "there are no folders in it"
        raise ValueError(f"{folder} must have a folder of images for each class of train, but {problem}")
    numbers = {name: label for label, name in enumerate(classes)}
    names: list[bytes] = []
    labels: list[int] = []
    for name in found:
        images = _images(folder / name)
        names += [os.fsencode(f"{name}/{image}") for image in images]
        labels += [numbers[name]] * len(images)
    return Files(folder, np.array(names), torch.tensor(labels))


def _images(folder: Path) -> list[str]:
    images = image_names(folder)
    if not images:
        raise ValueError(f"{folder} has no images: expected files that end with one of {', '.join(SUFFIXES)}")
    return images


def image_names(folder: Path) -> list[str]:
    """The image files of a folder, sorted; not the hidden ones, such as the ._1.jpg that macOS puts beside a 1.jpg."""
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    return [name for name in names if name.lower().endswith(SUFFIXES)]
