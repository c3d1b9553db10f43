"""Files from their distributors: fetched, checked, and errors that say how to get them."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

ELSEWHERE = "name another folder with --data-dir or DCNET_DATA"


@dataclass(frozen=True)
class Remote:
    """A file that its distributor offers, and what tells whether it arrived whole, as "sha256:..."."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


def broken(path: Path | str, problem: str, url: str) -> ValueError:
    """The error for a file that is not what its name promises."""
    problem = " ".join(problem.split())
    return ValueError(f"{path} cannot be used: {problem}; replace it by that from {url}, or {ELSEWHERE}")


def missing(name: str, folder: Path, expected: str, url: str) -> ValueError:
    """The error for a data set that is not there and must not be downloaded."""
    return ValueError(f"{name} is not in {folder}: expected {expected}; get it from {url}, or {ELSEWHERE}")


def fetch(remote: Remote, folder: Path) -> Path:
    """The file in the folder, downloaded unless it is there already; shows a bar and checks what came."""
    checked, new = _Checked(remote), not folder.exists()
    try:
        return Path(pooch.retrieve(remote.url, remote.checksum, remote.name, folder, downloader=checked))
    except OSError as error:
        # All errors of the network are OSErrors, too; what they hold of a connection stays open otherwise.
        response = getattr(error, "response", None)
        if response is not None:
            response.close()
        if new:
            # Nothing came into it, or else it stays.
            with suppress(OSError):
                folder.rmdir()
        raise ValueError(
            f"cannot download {remote.url} to {folder}: {_reason(error)}; put {remote.name} there by other means, "
            f"or {ELSEWHERE}"
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong first: libraries wrap a refused connection into several errors of their own."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


class _Checked:
    """A downloader of pooch's that shows a bar, and says in one sentence what is wrong with the file that came."""

    def __init__(self, remote: Remote):
        self.remote = remote

    def __call__(self, url: str, file: Any, owner: Any) -> None:
        with _bar() as progress:
            bar = _Bar(progress, self.remote.name)
            pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=30)(url, file, owner)
        algorithm = self.remote.checksum.split(":")[0]
        found = f"{algorithm}:{pooch.file_hash(file, alg=algorithm)}"
        if found != self.remote.checksum:
            problem = f"its checksum is {found}, not {self.remote.checksum}"
            raise ValueError(f"{url} gave another file than expected: {problem}; try again later, or {ELSEWHERE}")


def _bar() -> Progress:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True))


class _Bar:
    """A bar of rich's with the methods of tqdm's that pooch calls."""

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
        """Nothing: the bar stays until the download has ended."""
