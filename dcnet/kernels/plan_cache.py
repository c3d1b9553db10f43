"""Choices that are measured once per GPU and shape, remembered on disk; a lost or damaged file costs a measurement."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcnet.files import expanded, read_json, write_json

# Increases whenever the meaning of a choice changes; files of other versions are ignored.
VERSION = 1


def cache_folder() -> Path | None:
    """The folder of the choices: in DCNET_CACHE, else in the user's cache; None for a user without a home."""
    given = os.environ.get("DCNET_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = expanded(given)
    except ValueError:
        return None
    return folder / "plans" if os.environ.get("DCNET_CACHE") else folder / "dcnet" / "plans"


def remembered(key: str) -> Any:
    """The choice for a key; None if there is none, or if its file is damaged or from another version."""
    path = _path_of(key)
    if path is None:
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    fits = isinstance(found, dict) and found.get("version") == VERSION and found.get("key") == key
    return found.get("choice") if fits else None


def remember(key: str, choice: Any) -> None:
    """Writes the choice for a key to a file of its own, which replaces an older one; does nothing if it cannot."""
    path = _path_of(key)
    if path is not None:
        # A folder may be read-only, and a disk full: the choice is then measured again by the next process.
        with suppress(OSError, ValueError):
            write_json(path, {"version": VERSION, "key": key, "choice": choice})


def _path_of(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
