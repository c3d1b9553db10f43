"""Files written whole or not at all, and files from strangers read within limits."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# The records that dcnet writes have less than a megabyte.
LARGEST_JSON = 64 << 20
# No number that dcnet writes is larger; Python's whole numbers have no end, and sums and squares of floats overflow.
LARGEST_WHOLE, LARGEST_NUMBER = 2**64, 1e100
# Of lists and objects inside of each other; what reads them may go down by calls.
DEEPEST = 100
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def write_atomically(path: Path | str, content: bytes) -> None:
    """Writes the file through a temporary one beside it, and creates its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                # Without it, a machine that loses its power may be left with the new name and none of the content.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Inside, an OSError has the name of this file: those of a full disk have none, and others that of a temporary."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_utf8(path: Path) -> None:
    """Refuses a path that is not UTF-8, as names from old archives may be: no record and no message could name it."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"the path {str(path)!r} is not UTF-8, and no record could name it: rename the folder"
        ) from None


def expanded(path: Path | str) -> Path:
    """The path, with the home folder in the place of a ~ at its beginning."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r} is in a home folder, and none is known: set HOME, or give the path") from None


def sentence_of(error: Exception) -> str:
    """What an error says, in words for a person: the reason and the file of one of the system, without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {str(error.filename)!r}"


def write_json(path: Path | str, value: Any) -> None:
    """Writes the value as indented JSON; NaN and infinity, which JSON has no words for, are an error."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def open_regular(path: Path | str) -> BinaryIO:
    """The file, opened to be read; an OSError for anything that is no regular file, such as a pipe without a writer."""
    # A pipe would otherwise make the process wait for somebody to write into it.
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
    """The content of a regular file; a ValueError if it is larger than the limit, before it is read."""
    with open_regular(path) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else b""
        size = max(os.fstat(file.fileno()).st_size, len(content))
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and {limit:,} is the limit")
    return content


def read_json(path: Path | str, any_number: bool = False) -> Any:
    """The value in a file of JSON; a ValueError if it is none, too large or too deep, or has numbers without end.

    NaN and infinity are no JSON, though others may write them: `any_number` is for who checks all numbers anyway.
    """
    text = read_limited(path, LARGEST_JSON).decode()
    limits: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite, "parse_int": _whole}
    try:
        value = json.loads(text, **({} if any_number else limits))
        if SURROGATE.search(text):
            # Halves of a character, which can be neither printed nor written, but for both halves side by side.
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


def _refuse(word: str) -> None:
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
