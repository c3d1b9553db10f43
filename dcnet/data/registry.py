"""Data sets by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pooch

from dcnet.data.dataset import Dataset
from dcnet.data.download import Remote
from dcnet.data.folder import FolderDataset
from dcnet.spec import unknown

# From the folder with the user's data, and whether what is not there may be downloaded into it.
Loader = Callable[[Path, bool], Dataset | FolderDataset]


@dataclass(frozen=True)
class Entry:
    """How a data set is loaded, a line about it, and the files that are downloaded for it."""

    load: Loader
    about: str
    files: tuple[Remote, ...] = ()


datasets: dict[str, Entry] = {}


def register(name: str, about: str, files: tuple[Remote, ...] = ()) -> Callable[[Loader], Loader]:
    """A decorator that enters the function that loads a data set under its name."""

    def enter(load: Loader) -> Loader:
        if name in datasets:
            raise ValueError(f"{name!r} is taken: there is a data set of that name")
        datasets[name] = Entry(load, about, files)
        return load

    return enter


def data_folder(folder: Path | str | None = None) -> Path:
    """The folder with the data: the one that is given, else that of DCNET_DATA, else the user's cache."""
    given = folder or os.environ.get("DCNET_DATA")
    return Path(given).expanduser() if given else Path(pooch.os_cache("dcnet"))


def load_dataset(name: str, folder: Path | str | None = None, download: bool = True) -> Dataset | FolderDataset:
    """The data set of that name.

    Args:
        name: one of `dcnet.data.datasets`.
        folder: where its files are; None for the folder of DCNET_DATA, or else a cache of the user's.
        download: whether files that are not there are fetched from their distributor.
    """
    if name not in datasets:
        raise unknown("dataset", name, datasets)
    return datasets[name].load(data_folder(folder), download)
