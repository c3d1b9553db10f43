"""Files of a dataset: downloads with checksums, archives read in memory, and errors that say where to get them."""

import functools
import gzip
import io
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from dcnet.files import open_regular, read_limited

OTHER_FOLDER = "name another folder with --data-dir or DCNET_DATA"


@dataclass(frozen=True)
class Remote:
    """A file to download, and its checksum as "sha256:..."."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@contextmanager
def naming_source(path: Path, url: str) -> Iterator[None]:
    """Adds the path of a file, and the URL of a correct one, to a ValueError about its content."""
    try:
        yield
    except ValueError as error:
        problem = " ".join(str(error).split())
        advice = f"replace it by the file from {url}, or {OTHER_FOLDER}"
        raise ValueError(f"{path} cannot be used: {problem}; {advice}") from error


def missing_dataset(name: str, folder: Path, expected: str, url: str) -> ValueError:
    """The error for a dataset that is not in the folder and must not be downloaded."""
    return ValueError(f"{name} is not in {folder}: expected {expected}; get it from {url}, or {OTHER_FOLDER}")


def fetch(remote: Remote, folder: Path) -> Path:
    """The path of the file in the folder; downloads a missing file with a progress bar, and verifies its checksum."""
    new, download = not folder.exists(), functools.partial(_download, remote)
    try:
        return Path(pooch.retrieve(remote.url, remote.checksum, remote.name, folder, downloader=download))
    except OSError as error:
        # Network errors are OSErrors, too; their connection would otherwise stay open.
        response = getattr(error, "response", None)
        if response is not None:
            response.close()
        if new:
            # Succeeds only if the folder is empty.
            with suppress(OSError):
                folder.rmdir()
        raise ValueError(
            f"cannot download {remote.url} to {folder}: {_reason(error)}; put {remote.name} there yourself, "
            f"or {OTHER_FOLDER}"
        ) from error


def _reason(error: BaseException) -> str:
    """The message of the first cause: libraries wrap a refused connection in several other errors."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _download(remote: Remote, url: str, file: Any, owner: Any) -> None:
    """A pooch downloader with a progress bar, and a one-sentence error for a wrong checksum."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = _Bar(progress, remote.name)
        pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=30)(url, file, owner)
    algorithm = remote.checksum.split(":")[0]
    found = f"{algorithm}:{pooch.file_hash(file, alg=algorithm)}"
    if found != remote.checksum:
        problem = f"its checksum is {found}, not {remote.checksum}"
        raise ValueError(f"{url} gave the wrong file: {problem}; try again later, or {OTHER_FOLDER}")


class _Bar:
    """A rich progress bar with the methods of tqdm that pooch calls."""

    def __init__(self, progress: Progress, name: str):
        self.progress = progress
        self.task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, size: int) -> None:
        self.progress.update(self.task, total=size or None)

    def update(self, size: int) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        """Does nothing: the bar stays until the download ends."""


# The largest file that is read from an archive has 155 MB.
MAX_FILE = 200_000_000
# Limits for an archive: unpacked bytes, and number of files.
MAX_ARCHIVE, MAX_FILES = 1_000_000_000, 10_000
# The largest header in bytes, since headers are read into memory; paths have at most 4,096 bytes.
MAX_HEADER = 1 << 16


def read_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    """The contents of files in a folder."""
    try:
        return {name: read_limited(folder / name, MAX_FILE) for name in names}
    except (OSError, ValueError) as error:
        raise ValueError(f"expected the files {', '.join(names)}, but {error}") from error


def read_archive(path: Path, folder: str, names: Collection[str]) -> dict[str, bytes]:
    """The contents of files in a folder of a .tar.gz; writes nothing to disk, so paths in the archive are harmless."""
    wanted = {PurePosixPath(folder, name): name for name in names}
    try:
        with open_regular(path) as file, gzip.open(file) as stream:
            found = _members(_LimitedStream(stream), wanted)
            # The checksum at the end of the archive is verified after everything is read.
            while stream.read(1 << 20):
                _check_position(stream.tell())
    except Exception as error:
        # Damaged headers raise many kinds of errors.
        raise ValueError(f"expected a complete .tar.gz, but {str(error) or type(error).__name__}") from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"expected {folder}/{missing[0]} in it, found no such file")
    return found


def _members(stream: "_LimitedStream", wanted: dict[PurePosixPath, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_FILES:
                raise ValueError(f"it has more than {MAX_FILES:,} files")
            name = wanted.get(PurePosixPath(member.name))
            if name is None or not member.isreg() or member.size > MAX_FILE:
                continue
            stream.limit = MAX_FILE
            file = archive.extractfile(member)
            found[name] = b"" if file is None else file.read()
            stream.limit = MAX_HEADER
    return found


def _check_position(position: int) -> None:
    if position > MAX_ARCHIVE:
        raise ValueError(f"it has more than {MAX_ARCHIVE:,} bytes unpacked")


class _LimitedStream(io.RawIOBase):
    """A stream with a limit on each read: tarfile reads headers of any size at once."""

    def __init__(self, stream: gzip.GzipFile):
        self.stream, self.limit = stream, MAX_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.limit:
            raise ValueError(f"it has a header of {size:,} bytes")
        return self.stream.read(size)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        _check_position(position)
        return self.stream.seek(position, whence)

    def tell(self) -> int:
        return self.stream.tell()
