"""Data sets by name."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pooch

from dcnet.data.dataset import Dataset
from dcnet.data.download import Remote
from dcnet.data.folder import FolderDataset
from dcnet.data.provenance import Origin, fingerprint_of
from dcnet.files import expanded
from dcnet.spec import unknown

# From the folder with the user's data, and whether what is not there may be downloaded into it.
Loader = Callable[[Path, bool], Dataset | FolderDataset]


@dataclass(frozen=True)
class Entry:
    """How a data set is loaded, a line about it, and the files that are downloaded for it.

    With `from_folder` its contents are whatever is in the user's folder, and its name does not tell one from another.
    """

    load: Loader
    about: str
    files: tuple[Remote, ...] = ()
    from_folder: bool = False


datasets: dict[str, Entry] = {}


def register(
    name: str, about: str, files: tuple[Remote, ...] = (), from_folder: bool = False
) -> Callable[[Loader], Loader]:
    """A decorator that enters the function that loads a data set under its name.

    Args:
        name: of the data set.
        about: a line about it.
        files: that are downloaded for it.
        from_folder: whether its contents are whatever is in the user's folder; they are then part of what a run is.
    """

    def enter(load: Loader) -> Loader:
        if name in datasets:
            raise ValueError(f"{name!r} is taken: there is a data set of that name")
        datasets[name] = Entry(load, about, files, from_folder)
        return load

    return enter


def data_folder(folder: Path | str | None = None) -> Path:
    """The folder with the data: the one that is given, else that of DCNET_DATA, else the user's cache."""
    given = folder or os.environ.get("DCNET_DATA")
    return expanded(given) if given else _cache()


def _cache() -> Path:
    """The user's cache; a folder among the temporary ones for a user without a home, as in many a container."""
    try:
        found = Path(pooch.os_cache("dcnet"))
    except RuntimeError:
        found = Path()
    # Where there is no home, it may also be a path that begins with ~.
    return found if found.is_absolute() else Path(tempfile.gettempdir()) / f"dcnet-{os.getuid()}"


def load_dataset(name: str, folder: Path | str | None = None, download: bool = True) -> Dataset | FolderDataset:
    """The data set of that name.

    Args:
        name: one of `dcnet.data.datasets`.
        folder: where its files are; None for the folder of DCNET_DATA, or else a cache of the user's.
        download: whether files that are not there are fetched from their distributor.
    """
    if name not in datasets:
        raise unknown("dataset", name, datasets)
    entry, place = datasets[name], data_folder(folder)
    found = entry.load(place, download)
    if not entry.from_folder:
        origin = Origin(name)
    else:
        within = found.folder if isinstance(found, FolderDataset) else None
        origin = Origin(name, (within or place).absolute(), fingerprint_of(found))
    object.__setattr__(found, "origin", origin)
    return found
