"""Folders of images: train/<class>/*.jpg and val/<class>/*.jpg as of ImageNet, or <class>/*.jpg alone."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dcnet.data.decode import Files
from dcnet.data.download import ELSEWHERE
from dcnet.data.folder import FolderDataset
from dcnet.data.order import seeded
from dcnet.data.registry import register

NAME = "imagefolder"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# Of the images of each class, where nothing says which are for the test: one in so many.
ONE_IN = 5
# Which images these are must not change from run to run.
SPLIT_SEED = 0
ABOUT = "your own images, or ImageNet: <class>/*.jpg, or that in train and in val; read while training"


@register(NAME, ABOUT, from_folder=True)
def load_image_folder(folder: Path, download: bool = False) -> FolderDataset:
    """The images of the folder, or of imagenet or imagefolder in it; there is nothing to download.

    A folder without train and val, with a folder of images for each class, is split: one image in five is for the
    test, always the same ones.
    """
    root = image_root(folder)
    if root is None and (unsplit := _unsplit_root(folder)):
        return _split(unsplit)
    train = _part(root or folder, "train", or_else=" and val/<class>/*.jpg, or <class>/*.jpg,")
    test = _part(root or folder, "val", "test")
    classes = _classes(train)
    files = scan(train, classes), scan(test, classes)
    return FolderDataset(NAME, *files, tuple(classes), folder=root)


def image_root(folder: Path) -> Path | None:
    """The folder with images to train on: the one given, or imagenet or imagefolder in it."""
    return next((root for root in _roots(folder) if (root / "train").is_dir()), None)


def _roots(folder: Path) -> tuple[Path, ...]:
    return folder, folder / "imagenet", folder / NAME


def _unsplit_root(folder: Path) -> Path | None:
    """The first of the same folders that has no part for the test, and images right in its folders."""
    for root in _roots(folder):
        whole = root.is_dir() and not any((root / name).is_dir() for name in ("val", "test"))
        if whole and any(image_names(root / name) for name in _classes(root)):
            return root
    return None


def _split(root: Path) -> FolderDataset:
    """The images of a folder, of which some of each class are set apart; one stays to train on."""
    classes = _classes(root)
    files = scan(root, classes)
    counts = torch.bincount(files.labels, minlength=len(classes)).tolist()
    apart = torch.zeros(len(files), dtype=torch.bool)
    begin = 0
    for label, count in enumerate(counts):
        number = min(count - 1, max(1, (count + ONE_IN // 2) // ONE_IN))
        chosen = torch.randperm(count, generator=seeded(SPLIT_SEED, label))[:number]
        apart[begin + chosen] = True
        begin += count
    if not apart.any():
        raise ValueError(f"{root} has one image of each class: expected more, some of them for the test")
    train, test = (Files(root, files.names[part.numpy()], files.labels[part]) for part in (~apart, apart))
    return FolderDataset(NAME, train, test, tuple(classes), folder=root, held_out=1 / ONE_IN)


def _part(root: Path, *names: str, or_else: str = "") -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = " or ".join(f"{name}/<class>/*.jpg" for name in names)
    raise ValueError(f"{NAME} is not in {root}: expected {expected}{or_else} there; {ELSEWHERE}")


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
