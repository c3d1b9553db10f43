"""The registry of datasets, and loading by name."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pooch

from dcnet.data.dataset import Dataset, Origin
from dcnet.data.download import Remote
from dcnet.data.folder_dataset import FolderDataset
from dcnet.files import expanded
from dcnet.registry import Registry

# A function of the data folder, and of whether missing files may be downloaded into it.
Loader = Callable[[Path, bool], Dataset | FolderDataset]


@dataclass(frozen=True)
class Entry:
    """A registered dataset; see `register`."""

    load: Loader
    about: str
    files: tuple[Remote, ...] = ()
    from_folder: bool = False


datasets: Registry[Entry] = Registry("a dataset", discover="dcnet.data")


def register(
    name: str, about: str, files: tuple[Remote, ...] = (), from_folder: bool = False
) -> Callable[[Loader], Loader]:
    """A decorator that registers the loader of a dataset.

    Args:
        name: the name of the dataset.
        about: a one-line description.
        files: the files to download.
        from_folder: the contents depend on the user's folder, and become part of a run's identity.
    """

    def enter(load: Loader) -> Loader:
        datasets.add(name, Entry(load, about, files, from_folder), module=load.__module__)
        return load

    return enter


def data_folder(folder: Path | str | None = None) -> Path:
    """The data folder: the given one, else DCNET_DATA, else the user's cache."""
    given = folder or os.environ.get("DCNET_DATA")
    return expanded(given) if given else _cache()


def _cache() -> Path:
    """The user's cache; a temporary folder for a user without a home, as in many containers."""
    try:
        found = Path(pooch.os_cache("dcnet"))
    except RuntimeError:
        found = Path()
    # Without a home folder, the path may still begin with ~.
    return found if found.is_absolute() else Path(tempfile.gettempdir()) / f"dcnet-{os.getuid()}"


def load_dataset(name: str, folder: Path | str | None = None, download: bool = True) -> Dataset | FolderDataset:
    """Loads a registered dataset.

    Args:
        name: one of `dcnet.data.datasets`.
        folder: the folder of its files; None for DCNET_DATA, or else the user's cache.
        download: whether to download missing files.
    """
    entry, place = datasets[name], data_folder(folder)
    dataset, origin = entry.load(place, download), Origin(name)
    if entry.from_folder:
        within = dataset.folder if isinstance(dataset, FolderDataset) else None
        origin = Origin(name, (within or place).absolute(), dataset.fingerprint())
    object.__setattr__(dataset, "origin", origin)
    return dataset
