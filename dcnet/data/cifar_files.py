"""The two ways in which CIFAR is shipped: binary records, and pickles of Python 2."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcnet.data.archive import read_archive, read_folder
from dcnet.data.download import Remote, broken
from dcnet.data.pickles import load_table

PIXELS = 3 * 32 * 32

# Images [N, 3072] and labels [N] from the content of a file, whose name and URL are for errors.
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Parser = Callable[[bytes, str, str], Arrays]


@dataclass(frozen=True)
class Records:
    """Records of labels and pixels, a byte each; every label has its limit, and the last one counts."""

    limits: tuple[int, ...]

    def __call__(self, content: bytes, path: str, url: str) -> Arrays:
        size = len(self.limits) + PIXELS
        if not content or len(content) % size:
            raise broken(path, f"expected one or more records of {size} bytes, found {len(content)} bytes", url)
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        for column, limit in enumerate(self.limits):
            _check_labels(records[:, column], limit, path, url)
        return records[:, len(self.limits) :], records[:, len(self.limits) - 1]


@dataclass(frozen=True)
class Pickled:
    """A dictionary with an array "data", and a list of labels below `limit` under their own name."""

    labels: str
    limit: int

    def __call__(self, content: bytes, path: str, url: str) -> Arrays:
        table = load_table(content, path, url)
        images, labels = table.get("data"), table.get(self.labels)
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
            raise broken(path, f"expected 'data' to be uint8 [N, {PIXELS}], found {found}", url)
        if not (isinstance(labels, list) and len(labels) == len(images) and {*map(type, labels)} == {int}):
            raise broken(path, f"expected {self.labels!r} to be a whole number for each of {len(images)} images", url)
        _check_labels(np.array(labels), self.limit, path, url)
        return images, np.array(labels)


def _check_labels(labels: np.ndarray[Any, Any], limit: int, path: str, url: str) -> None:
    strange = labels[(labels < 0) | (labels >= limit)]
    if len(strange):
        raise broken(path, f"expected labels from 0 to {limit - 1}, found {strange[0]}", url)


@dataclass(frozen=True)
class Layout:
    """One way in which a data set is shipped: an archive with a folder of files."""

    archive: Remote
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Parser

    def unpacked(self, root: Path) -> Path | None:
        """The folder that has all of the files, if there is one: that of the archive, or the root itself."""
        for place in (root / self.folder, root):
            if all((place / name).is_file() for name in self.names):
                return place
        return None

    def packed(self, root: Path) -> Path | None:
        path = root / self.archive.name
        return path if path.is_file() else None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.train, *self.test)

    def read(self, place: Path) -> tuple[Arrays, Arrays]:
        """Images and labels to train on and to test with, from a folder or from the archive."""
        url = self.archive.url
        if place.is_dir():
            content = read_folder(place, self.names, url)
        else:
            content = read_archive(place, self.folder, self.names, url)
        parsed = {name: self.parse(content.pop(name), f"{place / name}", url) for name in self.names}
        return _joined([parsed[name] for name in self.train]), _joined([parsed[name] for name in self.test])


def _joined(parts: list[Arrays]) -> Arrays:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
