"""Files that are either the old ones or the new ones, never half of each."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path | str, content: bytes) -> None:
    """Writes the file through a temporary one beside it, and creates its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            # Without it, a machine that loses its power may be left with the new name and none of the content.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path | str, value: Any) -> None:
    """Writes the value as indented JSON; NaN and infinity, which JSON has no words for, are an error."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path | str) -> Any:
    """The value in a file of JSON; a ValueError if it is none, NaN and infinity included, which others may write."""
    return json.loads(Path(path).read_text(), parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"JSON has no {word}")
