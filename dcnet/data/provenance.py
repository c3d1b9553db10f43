"""Where a dataset was loaded from, and a fingerprint that tells its contents from others."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcnet.data.dataset import Dataset
    from dcnet.data.folder import FolderDataset

# Hexadecimal digits of a fingerprint.
DIGITS = 16


@dataclass(frozen=True)
class Origin:
    """How `load_dataset` found a dataset.

    Attributes:
        name: in the registry.
        folder: where its files are, if the user's folder decides what is in it.
        fingerprint: of its contents, likewise.
    """

    name: str
    folder: Path | None = None
    fingerprint: str | None = None


def fingerprint_of(dataset: "Dataset | FolderDataset") -> str:
    """Digits that other contents do not have: of all pixels in memory, or of the names and sizes of image files."""
    from dcnet.data.folder import FolderDataset

    found = hashlib.sha256("\n".join(dataset.classes).encode("utf-8", "surrogateescape"))
    if isinstance(dataset, FolderDataset):
        for part in (dataset.train, dataset.val):
            root = os.fsencode(part.root)
            # A file that is no longer there has no size; whoever reads it says so.
            lines = (b"%s %d\n" % (name, _size(os.path.join(root, name))) for name in map(bytes, part.names))
            found.update(b"%d files\n" % len(part) + b"".join(lines))
    else:
        for split in (dataset.train, dataset.test):
            found.update(repr(tuple(split.images.shape)).encode())
            for tensor in (split.images, split.labels):
                found.update(tensor.cpu().numpy().data)
    return found.hexdigest()[:DIGITS]


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
