"""One process a run."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Waits until no other process is changing the record of the folder, which takes a moment, and keeps them out."""
    with (folder / ".record.lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process and those it starts; the system lets it go however they end.

    A folder that was made for this, and that nothing came into, is removed.
    """
    new, lock = not folder.exists(), folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is working on {str(folder)!r}: wait until it has ended") from None
        try:
            yield
        finally:
            if new and list(folder.glob("*")) == [lock]:
                lock.unlink()
                folder.rmdir()
