"""Folders of images: train/<class>/*.jpg and val/<class>/*.jpg like ImageNet, or <class>/*.jpg, or people."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from dcnet.data.batches import make_generator
from dcnet.data.download import OTHER_FOLDER
from dcnet.data.folder_dataset import Files, FolderDataset
from dcnet.data.load import register

NAME = "imagefolder"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# Without a test part, one image in this many of each class is held out. The seed must not change between versions.
HELD_OUT_ONE_IN, SPLIT_SEED = 5, 0
ABOUT = "custom images or ImageNet: <class>/*.jpg, or train/<class>/*.jpg and val/<class>/*.jpg; read while training"


@register(NAME, ABOUT, from_folder=True)
def load_image_folder(folder: Path, download: bool = False) -> FolderDataset:
    """Loads the images of the folder, or of imagenet or imagefolder in it; there is nothing to download.

    A folder with one folder per class, without train and val, is split: one image in five is for the test, always the
    same ones.
    """
    root = find_image_root(folder)
    if root is None and (unsplit := _find_unsplit_root(folder)):
        return _split(unsplit)
    train = _part(root or folder, "train", alternatives=" and val/<class>/*.jpg, or <class>/*.jpg,")
    test = _part(root or folder, "val", "test")
    classes = _subfolders(train)
    return FolderDataset(NAME, scan(train, classes), scan(test, classes), tuple(classes), folder=root)


def find_image_root(folder: Path) -> Path | None:
    """The folder that has a train folder: the given one, or imagenet or imagefolder in it."""
    return next((root for root in _roots(folder) if (root / "train").is_dir()), None)


def _roots(folder: Path) -> tuple[Path, ...]:
    return folder, folder / "imagenet", folder / NAME


def _find_unsplit_root(folder: Path) -> Path | None:
    """The first of `_roots` that has images directly in its subfolders, and no test part."""
    for root in _roots(folder):
        unsplit = root.is_dir() and not any((root / name).is_dir() for name in ("val", "test"))
        if unsplit and any(image_names(root / name) for name in _subfolders(root)):
            return root
    return None


def _split(root: Path) -> FolderDataset:
    """The images of a folder, with some of each class held out; at least one stays for training."""
    classes = _subfolders(root)
    files = scan(root, classes)
    held_out = torch.zeros(len(files), dtype=torch.bool)
    begin = 0
    for label, count in enumerate(torch.bincount(files.labels, minlength=len(classes)).tolist()):
        number = min(count - 1, max(1, (count + HELD_OUT_ONE_IN // 2) // HELD_OUT_ONE_IN))
        drawn = torch.randperm(count, generator=make_generator(SPLIT_SEED, label))[:number]
        held_out[begin + drawn] = True
        begin += count
    if not held_out.any():
        raise ValueError(f"{root} has one image per class: expected more, some of them for the test")
    train, test = (Files(root, files.names[part.numpy()], files.labels[part]) for part in (~held_out, held_out))
    return FolderDataset(NAME, train, test, tuple(classes), folder=root, held_out=1 / HELD_OUT_ONE_IN)


def _part(root: Path, *names: str, alternatives: str = "") -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = " or ".join(f"{name}/<class>/*.jpg" for name in names)
    raise ValueError(f"{NAME} is not in {root}: expected {expected}{alternatives} there; {OTHER_FOLDER}")


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def scan(folder: Path, classes: Sequence[str]) -> Files:
    """The images of all classes, sorted by name."""
    found = _subfolders(folder)
    unknown = sorted(set(found) - set(classes))
    if not found or unknown:
        problem = f"the class {unknown[0]!r} is not in train" if unknown else "it has no subfolders"
        raise ValueError(f"{folder} must have a folder of images for each class of train, but {problem}")
    numbers = {name: label for label, name in enumerate(classes)}
    names: list[bytes] = []
    labels: list[int] = []
    for name in found:
        images = image_names(folder / name)
        if not images:
            raise ValueError(f"{folder / name} has no images: expected files that end with {', '.join(SUFFIXES)}")
        names += [os.fsencode(f"{name}/{image}") for image in images]
        labels += [numbers[name]] * len(images)
    return Files(folder, np.array(names), torch.tensor(labels))


def image_names(folder: Path) -> list[str]:
    """The image files of a folder, sorted; without hidden ones, such as the ._1.jpg that macOS puts beside 1.jpg."""
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    return [name for name in names if name.lower().endswith(SUFFIXES)]


def people_folders(root: Path | str) -> dict[str, tuple[str, ...]]:
    """The images of each person, as person/image, from a folder with one folder per person; sorted."""
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"there is no folder {str(root)!r}: expected one with a folder of images for each person")
    images = {person: tuple(f"{person}/{file}" for file in image_names(root / person)) for person in _subfolders(root)}
    if not any(images.values()):
        raise ValueError(f"{root} has no images: expected a folder of images for each person, such as Ada/Ada_0001.jpg")
    return {person: names for person, names in images.items() if names}


def labels_of(names: Iterable[str], people: Mapping[str, int] | None = None) -> tuple[Tensor, dict[str, int]]:
    """Labels int64 [N] of images by their folders, and the label of each person.

    Args:
        names: the names of files, person/image.
        people: earlier labels, so that a gallery and its probes share them; new people get the next labels.
    """
    numbers = dict(people or {})
    following = max(numbers.values(), default=-1) + 1
    labels = []
    for name in names:
        person = PurePosixPath(name).parent.name
        if not person:
            raise ValueError(f"the image {name!r} is not in the folder of a person: expected person/{name}")
        if person not in numbers:
            numbers[person] = following
            following += 1
        labels.append(numbers[person])
    return torch.tensor(labels, dtype=torch.int64), numbers
