"""CIFAR-10 and CIFAR-100 from folders or archives, and datasets derived from CIFAR-100."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcnet.data.batches import make_generator
from dcnet.data.dataset import Dataset, Split
from dcnet.data.download import Remote, fetch, missing_dataset, naming_source, read_archive, read_folder
from dcnet.data.load import data_folder, register
from dcnet.data.pickles import load_table

PIXELS = 3 * 32 * 32

# Images [N, 3072] and labels [N].
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class BinaryFile:
    """Reads rows of labels and pixels, one byte each; each label must be below its limit, and the last one is used."""

    limits: tuple[int, ...]

    def __call__(self, content: bytes) -> Arrays:
        size = len(self.limits) + PIXELS
        if not content or len(content) % size:
            raise ValueError(f"expected one or more records of {size} bytes, found {len(content)} bytes")
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        for column, limit in enumerate(self.limits):
            _check_labels(records[:, column], limit)
        return records[:, len(self.limits) :], records[:, len(self.limits) - 1]


@dataclass(frozen=True)
class PickleFile:
    """Reads a pickled dictionary with the array "data", and a list of labels below `limit` under the key `labels`."""

    labels: str
    limit: int

    def __call__(self, content: bytes) -> Arrays:
        table = load_table(content)
        images, labels = table.get("data"), table.get(self.labels)
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
            raise ValueError(f"expected 'data' to be uint8 [N, {PIXELS}], found {found}")
        if not (isinstance(labels, list) and len(labels) == len(images) and {*map(type, labels)} == {int}):
            raise ValueError(f"expected {self.labels!r} to be a whole number for each of {len(images)} images")
        _check_labels(np.array(labels), self.limit)
        return images, np.array(labels)


def _check_labels(labels: np.ndarray[Any, Any], limit: int) -> None:
    wrong = labels[(labels < 0) | (labels >= limit)]
    if len(wrong):
        raise ValueError(f"expected labels from 0 to {limit - 1}, found {wrong[0]}")


@dataclass(frozen=True)
class Layout:
    """A distribution of a dataset: an archive with a folder of files."""

    archive: Remote
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[bytes], Arrays]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.train, *self.test)

    def read(self, place: Path) -> tuple[Split, Split]:
        """The training and the test split, from a folder or from the archive."""
        with naming_source(place, self.archive.url):
            packed = not place.is_dir()
            content = read_archive(place, self.folder, self.names) if packed else read_folder(place, self.names)
        parsed = {}
        for name in self.names:
            with naming_source(place / name, self.archive.url):
                parsed[name] = self.parse(content.pop(name))
        return _split([parsed[name] for name in self.train]), _split([parsed[name] for name in self.test])


def _split(parts: list[Arrays]) -> Split:
    """The images and labels of several files."""
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return Split(images.view(-1, 3, 32, 32), labels.long())


URL = "https://www.cs.toronto.edu/~kriz/"
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

CLASSES_10 = "airplane automobile bird cat deer dog frog horse ship truck"
CLASSES_100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


@dataclass(frozen=True)
class Cifar:
    """A dataset that may be in one of several layouts; the first is the one to download."""

    name: str
    classes: tuple[str, ...]
    layouts: tuple[Layout, ...]

    @property
    def files(self) -> tuple[Remote, ...]:
        return (self.layouts[0].archive,)

    def load(self, folder: Path, download: bool) -> Dataset:
        """Reads the first layout found, or downloads the archive."""
        found = self._find(folder)
        if found is None and not download:
            folders = " or ".join(f"{layout.folder} or {layout.archive.name}" for layout in self.layouts)
            raise missing_dataset(self.name, folder, f"{folders}, with all files in it", self.files[0].url)
        layout, place = found or (self.layouts[0], fetch(self.files[0], folder))
        return Dataset(self.name, *layout.read(place), self.classes)

    def _find(self, folder: Path) -> tuple[Layout, Path] | None:
        """The first layout whose folder has all files, or else whose archive exists, and the path of either."""
        options = [(layout, root) for root in (folder, folder / self.name) for layout in self.layouts]
        folders = [(layout, place) for layout, root in options for place in (root / layout.folder, root)]
        unpacked = (pair for pair in folders if all((pair[1] / name).is_file() for name in pair[0].names))
        archives = ((layout, root / layout.archive.name) for layout, root in options)
        packed = (pair for pair in archives if pair[1].is_file())
        return next(itertools.chain(unpacked, packed), None)


def _archive(name: str, sha256: str) -> Remote:
    return Remote(f"{URL}{name}.tar.gz", f"sha256:{sha256}")


CIFAR_10 = Cifar(
    "cifar10",
    tuple(CLASSES_10.split()),
    (
        Layout(
            _archive("cifar-10-binary", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in BATCHES),
            ("test_batch.bin",),
            BinaryFile((10,)),
        ),
        Layout(
            _archive("cifar-10-python", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
            "cifar-10-batches-py",
            BATCHES,
            ("test_batch",),
            PickleFile("labels", 10),
        ),
    ),
)

CIFAR_100 = Cifar(
    "cifar100",
    tuple(CLASSES_100.split()),
    (
        Layout(
            _archive("cifar-100-binary", "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
            "cifar-100-binary",
            ("train.bin",),
            ("test.bin",),
            BinaryFile((20, 100)),
        ),
        Layout(
            _archive("cifar-100-python", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
            "cifar-100-python",
            ("train",),
            ("test",),
            PickleFile("fine_labels", 100),
        ),
    ),
)

_ABOUT = "photographs, 32 x 32, color, {} classes, 50,000 + 10,000 images; downloads {} MB"
register("cifar10", _ABOUT.format(10, 170), CIFAR_10.files)(CIFAR_10.load)
register("cifar100", _ABOUT.format(100, 169), CIFAR_100.files)(CIFAR_100.load)


VALIDATION, VALIDATION_10 = "cifar100-validation", "cifar10-validation"
# Held-out images of all classes; the seed must not change between versions.
VALIDATION_IMAGES, VALIDATION_SEED = 5_000, 0
VALIDATION_ABOUT = "the training images of CIFAR-{} split into 45,000 + 5,000, to tune recipes"


@register(VALIDATION, VALIDATION_ABOUT.format(100), CIFAR_100.files)
def load_cifar100_validation(folder: Path, download: bool = True) -> Dataset:
    """CIFAR-100 with 50 training images per class, always the same ones, as the test set."""
    return _validation(VALIDATION, CIFAR_100.load(folder, download))


@register(VALIDATION_10, VALIDATION_ABOUT.format(10), CIFAR_10.files)
def load_cifar10_validation(folder: Path, download: bool = True) -> Dataset:
    """CIFAR-10 with 500 training images per class, always the same ones, as the test set."""
    return _validation(VALIDATION_10, CIFAR_10.load(folder, download))


def _validation(name: str, whole: Dataset) -> Dataset:
    train, validation = hold_out(whole.train, len(whole.classes), VALIDATION_IMAGES // len(whole.classes))
    return Dataset(name, train, validation, whole.classes)


def hold_out(split: Split, classes: int, count: int) -> tuple[Split, Split]:
    """The split without `count` random images of each class, and those images; both in their original order."""
    order = torch.randperm(len(split), generator=make_generator(VALIDATION_SEED, 0))
    labels = split.labels[order]
    drawn = torch.cat([order[labels == label][:count] for label in range(classes)])
    held = torch.zeros(len(split), dtype=torch.bool)
    held[drawn] = True
    return split[~held], split[held]


@dataclass(frozen=True)
class OpenSet:
    """A dataset with some of the classes, and the images of the others.

    Args:
        known: the classes for training, relabeled from 0 in their original order.
        unseen: all images of the other classes, relabeled likewise, those of the training set first.
        unseen_classes: names in the order of the labels.
    """

    known: Dataset
    unseen: Split
    unseen_classes: tuple[str, ...]


def split_classes(dataset: Dataset, unseen: int, seed: int = 0) -> OpenSet:
    """Leaves out `unseen` random classes, the same ones for the same seed."""
    classes = len(dataset.classes)
    if not 1 <= unseen <= classes - 2:
        raise ValueError(
            f"unseen must be from 1 to {classes - 2}, so that two of {classes} classes are left, not {unseen}"
        )
    order = torch.randperm(classes, generator=make_generator(seed, 0))
    others, known = (part.sort().values for part in (order[:unseen], order[unseen:]))
    train, test = (_keep_classes(split, known, classes) for split in (dataset.train, dataset.test))
    rest = [_keep_classes(split, others, classes) for split in (dataset.train, dataset.test)]
    joined = Split(torch.cat([part.images for part in rest]), torch.cat([part.labels for part in rest]))
    name = f"{dataset.name}-{len(known)}-of-{classes}-seed{seed}"
    names = [tuple(dataset.classes[label] for label in part.tolist()) for part in (known, others)]
    return OpenSet(Dataset(name, train, test, names[0]), joined, names[1])


def _keep_classes(split: Split, kept: Tensor, classes: int) -> Split:
    new = torch.full((classes,), -1, dtype=torch.int64)
    new[kept] = torch.arange(len(kept))
    labels = new.to(split.labels.device)[split.labels]
    return Split(split.images, labels)[labels >= 0]


OPEN_NAME = "cifar100-open"
# The seed must not change between versions.
UNSEEN, OPEN_SEED = 20, 0
OPEN_ABOUT = "80 classes of CIFAR-100, 40,000 + 8,000 images; the other 20 are for verification"


def cifar100_open(folder: Path | str | None = None, download: bool = True) -> OpenSet:
    """80 classes for training, and all 12,000 images of the other 20; always the same classes."""
    parts = split_classes(CIFAR_100.load(data_folder(folder), download), UNSEEN, OPEN_SEED)
    return dataclasses.replace(parts, known=dataclasses.replace(parts.known, name=OPEN_NAME))


@register(OPEN_NAME, OPEN_ABOUT, CIFAR_100.files)
def load_cifar100_open(folder: Path, download: bool = True) -> Dataset:
    """The 80 classes for training."""
    return cifar100_open(folder, download).known
