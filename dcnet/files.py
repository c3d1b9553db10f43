"""Atomic writes, and reads of untrusted files within limits."""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

# The records that dcnet writes have less than a megabyte.
LARGEST_JSON = 64 << 20
# No number that dcnet writes is larger. Without limits, sums and squares of floats could overflow.
LARGEST_WHOLE, LARGEST_NUMBER = 2**64, 1e100
# The deepest nesting of lists and objects, since code that reads them may recurse.
DEEPEST = 100
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[BinaryIO]:
    """A file to write; it gets its name at the end, unless an exception is raised. Creates its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                # Otherwise a power failure may leave the new name without the content.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_atomically(path: Path | str, content: bytes) -> None:
    """Writes the file through a temporary one beside it, and creates its folder."""
    with atomic_file(path) as file:
        file.write(content)


def fingerprint(path: Path | str) -> str:
    """The SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Gives an OSError the name of this file, instead of no name or that of a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_utf8(path: Path) -> None:
    """Raises ValueError for a path that is not UTF-8, as from old archives: no record or message could contain it."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"the path {str(path)!r} is not UTF-8, so that no record can contain it: rename the folder"
        ) from None


def expanded(path: Path | str) -> Path:
    """The path, with a leading ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{str(path)!r} needs a home folder, but there is none: set HOME, or give a full path"
        ) from None


def sentence_of(error: Exception) -> str:
    """The message of an error; for an OSError its reason and file, without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {str(error.filename)!r}"


def reason_of(error: Exception) -> str:
    """The message of an error; for an OSError its reason, without its number and file."""
    return getattr(error, "strerror", None) or str(error)


def write_json(path: Path | str, value: Any) -> None:
    """Writes the value as indented JSON; NaN and infinity, which JSON does not have, are an error."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def open_regular(path: Path | str) -> BufferedReader:
    """The file, opened for reading; an OSError if it is not a regular file, such as a pipe."""
    # Otherwise opening a pipe would block until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: Path | str, limit: int) -> bytes:
    """The content of a regular file; a ValueError, before reading, if it is larger than the limit."""
    with open_regular(path) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else b""
        size = max(os.fstat(file.fileno()).st_size, len(content))
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and {limit:,} is the limit")
    return content


def read_json(path: Path | str, any_number: bool = False) -> Any:
    """The value in a JSON file; a ValueError if it is invalid, too large or too deep, or has huge numbers.

    `any_number` accepts NaN, infinity and huge numbers, for callers that check all numbers.
    """
    text = read_limited(path, LARGEST_JSON).decode()
    limits: dict[str, Any] = {"parse_constant": _reject, "parse_float": _finite, "parse_int": _whole}
    try:
        value = json.loads(text, **({} if any_number else limits))
        if SURROGATE.search(text):
            # Half of a surrogate pair can be neither printed nor written; both halves together can.
            json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        lists = [part for part in level if isinstance(part, list)]
        objects = [part.values() for part in level if isinstance(part, dict)]
        level = [inner for part in (*lists, *objects) for inner in part]
        if not level:
            return
    raise RecursionError


def _reject(word: str) -> None:
    raise ValueError(f"JSON has no {word}")


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= LARGEST_NUMBER:
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > LARGEST_WHOLE:
        raise ValueError(f"the number {text[:40]} is too large")
    return value
