"""MNIST and Fashion-MNIST from idx files, plain or gzipped, and the digits of scikit-learn."""

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from dcnet.data.cifar import hold_out
from dcnet.data.dataset import Dataset, Split
from dcnet.data.download import Remote, fetch, missing_dataset, naming_source
from dcnet.data.load import register
from dcnet.files import open_regular

Stream = BinaryIO | gzip.GzipFile

# The magic number of idx files with unsigned bytes, without the number of dimensions.
UNSIGNED_BYTES = 0x800
# The largest content; 60,000 images of 28 x 28 have 47 MB.
MAX_BYTES = 200_000_000


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads the uint8 array of an idx file."""
    try:
        with open_regular(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
            shape = _shape(stream, dimensions)
            content = _content(stream, shape)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"expected a complete file, gzipped if it ends with .gz, but {error}") from error
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape).copy())


def _shape(stream: Stream, dimensions: int) -> tuple[int, ...]:
    start, magic = 4 + 4 * dimensions, struct.pack(">I", UNSIGNED_BYTES + dimensions)
    head = stream.read(start)
    if head[:4] != magic:
        raise ValueError(f"expected the magic number {magic.hex()}, found {head[:4].hex() or 'nothing'}")
    if len(head) < start:
        raise ValueError(f"expected {start} bytes of sizes, found {len(head)}")
    return struct.unpack(f">{dimensions}I", head[4:])


def _content(stream: Stream, shape: tuple[int, ...]) -> bytes:
    """The bytes after the sizes; reads at most one byte more, even if the unpacked file is larger."""
    size, start = math.prod(shape), 4 + 4 * len(shape)
    if size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES:,} bytes, found sizes that need {size:,}")
    content = stream.read(size + 1)
    if len(content) != size or not shape[0]:
        found = f"{start + len(content)}{' or more' if len(content) > size else ''}"
        raise ValueError(f"expected {start + size} bytes for {shape[0]} entries, and at least one entry, found {found}")
    return content


SIDE = 28
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# Both datasets use the same file names, but differ in the SHA-256 of the training labels.
OWNERS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": "mnist",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": "fashion-mnist",
}


@dataclass(frozen=True)
class Mnist:
    """A dataset of four idx files: training and test images and labels.

    Args:
        name: the name of the dataset, and of the folder for downloads.
        url: the URL up to the file names.
        checksums: the checksums of the gzipped files.
        folders: folders to search before the data folder itself.
        classes: the names of the classes.
    """

    name: str
    url: str
    checksums: tuple[str, ...]
    folders: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def files(self) -> tuple[Remote, ...]:
        return tuple(Remote(f"{self.url}{name}.gz", known) for name, known in zip(NAMES, self.checksums, strict=True))

    def load(self, folder: Path, download: bool) -> Dataset:
        """Reads the files from the first folder that has all of them, or downloads them."""
        paths = self._find(folder)
        if paths is None and not download:
            places = " or ".join((*self.folders, "the folder itself"))
            raise missing_dataset(
                self.name, folder, f"{', '.join(NAMES)}, each plain or with .gz, in {places}", self.url
            )
        if paths is None:
            paths = [fetch(file, folder / self.name) for file in self.files]
        train, test = self._split(paths[0], paths[1]), self._split(paths[2], paths[3])
        return Dataset(self.name, train, test, self.classes)

    def _find(self, folder: Path) -> list[Path] | None:
        for place in (*(folder / name for name in self.folders), folder):
            plain = [place / name for name in NAMES]
            paths = [path if path.is_file() else path.with_name(f"{path.name}.gz") for path in plain]
            if all(path.is_file() for path in paths):
                return paths
        return None

    def _split(self, at_images: Path, at_labels: Path) -> Split:
        with naming_source(at_images, self.url):
            images = read_idx(at_images, 3)
            if images.shape[1:] != (SIDE, SIDE):
                found = f"{images.shape[1]}x{images.shape[2]}"
                raise ValueError(f"expected images of {SIDE}x{SIDE}, found {found}")
        with naming_source(at_labels, self.url):
            labels = read_idx(at_labels, 1)
            self._check_labels(labels, len(images))
        return Split(images.unsqueeze(1), labels.long())

    def _check_labels(self, labels: Tensor, count: int) -> None:
        if len(labels) != count:
            raise ValueError(f"expected {count} labels, one for each image, found {len(labels)}")
        if labels.max() >= len(self.classes):
            raise ValueError(f"expected labels from 0 to {len(self.classes) - 1}, found {labels.max()}")
        owner = OWNERS.get(hashlib.sha256(labels.numpy().tobytes()).hexdigest(), self.name)
        if owner != self.name:
            raise ValueError(f"expected labels of {self.name}, found those of {owner}")


MNIST = Mnist(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    ("mnist", "MNIST/raw", "MNIST", "mnist/raw"),
    tuple("0123456789"),
)

FASHION_MNIST = Mnist(
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist", "fashion"),
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

_ABOUT = "{}, 28 x 28, gray, 10 classes, 60,000 + 10,000 images; downloads {} MB"
register("mnist", _ABOUT.format("handwritten digits", 12), MNIST.files)(MNIST.load)
register("fashion-mnist", _ABOUT.format("clothes", 31), FASHION_MNIST.files)(FASHION_MNIST.load)


TRAINING_IMAGES, DIGITS = 600, tuple("0123456789")
DIGITS_VALIDATION, HELD_OUT_PER_CLASS = "digits-validation", 15


@register("digits", "handwritten digits, 8 x 8, gray, 10 classes, 600 + 1,197 images; comes with scikit-learn")
def load_digits(folder: Path | None = None, download: bool = False) -> Dataset:
    """600 training images, stratified by class; more would be too easy. Needs no folder."""
    return Dataset("digits", *_split_digits(), DIGITS)


@register(DIGITS_VALIDATION, "the training images of digits, 450 + 150: to choose recipes without the test images")
def load_digits_validation(folder: Path | None = None, download: bool = False) -> Dataset:
    """The training images of the digits without 15 of each class, and those as test images."""
    train, _ = _split_digits()
    return Dataset(DIGITS_VALIDATION, *hold_out(train, len(DIGITS), HELD_OUT_PER_CLASS), DIGITS)


def _split_digits() -> tuple[Split, Split]:
    """Training and test images."""
    # Imported here, since it takes a second and only this dataset needs it.
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, classes = datasets.load_digits(return_X_y=True)
    # From 16 gray levels to bytes.
    images = torch.tensor(pixels * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(classes, dtype=torch.int64)
    train, test = train_test_split(range(len(images)), train_size=TRAINING_IMAGES, random_state=0, stratify=classes)
    split = Split(images, labels)
    return split[train], split[test]
