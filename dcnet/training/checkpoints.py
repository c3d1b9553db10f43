"""Checkpoints: one file each, complete or not there at all, with a sum that tells a damaged one."""

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from dcnet.files import naming, open_regular, write_atomically

KEPT = 2
# There is nothing of that name, or a pipe.
NO_FILE = (errno.ENOENT, errno.EINVAL)
_FILE = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What was kept at a step: tensors by name, and notes of plain values."""

    step: int
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Writes tensors and notes into one file, with a sum over both."""
    dense = _apart({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    described = json.dumps(notes, allow_nan=False)
    # Under one name, since several would be written in any order, and equal contents give equal files.
    about = json.dumps({"sum": _sum(dense, described), "notes": described})
    write_atomically(path, save(dense, {"dcnet": about}))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a copy of each that lies in the memory of another, as tied weights do: files hold none such."""
    found: dict[int, str] = {}
    owner = {name: found.setdefault(value.untyped_storage().data_ptr(), name) for name, value in tensors.items()}
    return {name: value if owner[name] == name else value.clone() for name, value in tensors.items()}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; a ValueError in one sentence for any other file, and for a damaged one.

    A file that is there and cannot be read is an OSError: nobody knows whether it is damaged.
    """
    try:
        return _parsed(path, _content(path))
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error.strerror}") from None


def _content(path: Path) -> bytes:
    """Read, and not mapped into memory, where an error of the disk would end the process without a word."""
    with naming(path), open_regular(path) as file:
        return file.read()


def _parsed(path: Path, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = _read_json((header.get("__metadata__") or {}).get("dcnet", "{}"))
    except (SafetensorError, KeyError, ValueError) as error:
        # A KeyError is a kind of number that torch does not have.
        raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error}") from None
    if not isinstance(about.get("notes"), str):
        raise ValueError(
            f"{str(path)!r} is not of dcnet, which notes what its weights are of: expected model.safetensors of a run, "
            "or one of its checkpoints"
        )
    if _sum(tensors, about["notes"]) != about.get("sum"):
        raise ValueError(f"{str(path)!r} is damaged: its contents do not have the sum that was written with them")
    try:
        return tensors, _read_json(about["notes"])
    except ValueError as error:
        raise ValueError(f"{str(path)!r} has notes that cannot be read: {error}") from None


def _read_json(text: str) -> dict[str, Any]:
    """The values by name that the text holds, or a ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected values by name, as JSON, not a {type(found).__name__}")
    return found


def _sum(tensors: Mapping[str, Tensor], notes: str) -> int:
    total = zlib.crc32(notes.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        # As bytes, since numpy has no bfloat16.
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


class Checkpoints:
    """The newest checkpoints of a run, in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, step: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
        """Writes one more, and only then removes the oldest, and those of later steps, which could not be used."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write_tensors(path, tensors, notes)
        files = self.files()
        kept = files[: files.index(path) + 1][-KEPT:]
        for old in files:
            if old not in kept:
                old.unlink(missing_ok=True)
        return path

    def files(self) -> list[Path]:
        """From the oldest to the newest; what an interrupted write left behind is not among them."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _FILE.fullmatch(path.name)), key=_step)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest one that is whole, and what was wrong with those after it.

        One that cannot be read is an OSError: it may well be whole, and a run that went on without it would replace it.
        """
        complaints: list[str] = []
        for path in reversed(self.files()):
            try:
                return Checkpoint(_step(path), *_parsed(path, _content(path))), complaints
            except ValueError as error:
                complaints.append(str(error))
        return None, complaints

    def clear(self) -> None:
        """Removes all of them, and their folder unless somebody put something else there."""
        for path in self.files():
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def remove_leftovers(self) -> None:
        """Removes the temporary files of writes that were interrupted."""
        for path in self.folder.glob(".step-*.tmp") if self.folder.is_dir() else ():
            path.unlink(missing_ok=True)


def _step(path: Path) -> int:
    found = _FILE.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def check_room(folder: Path, model: nn.Module) -> None:
    """Better no training than one whose results have no place; the folder need not be there yet."""
    # Weights and two moments in each of the files that are kept, and in one that is being written.
    needed = 3 * (KEPT + 1) * sum(value.nbytes for value in model.state_dict().values())
    status = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise OSError(
            f"the disk of {str(folder)!r} has {free / 2**20:.0f} MiB left, and the checkpoints of this run need "
            f"{needed / 2**20:.0f}: make room, or choose another folder with --runs"
        )
