"""The checkpoints of a run: one file each, or a folder with a file per process if the weights are sharded."""

import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dcnet.training.config import RunConfig
from dcnet.training.identity import some_names
from dcnet.training.record import Curves, DataDescription, Record
from dcnet.training.shards import Part, Shards, ShardsError
from dcnet.training.state import parts_of
from dcnet.training.tensor_files import TensorFile, write_tensors

# The folder of checkpoints inside the folder of a run.
CHECKPOINTS = "checkpoints"
KEPT = 2
_FILE = re.compile(r"step-\d+(\.safetensors)?")


@dataclass(frozen=True)
class Checkpoint:
    """The file or files with the tensors of a step, and notes: JSON values by name."""

    step: int
    shards: Shards
    notes: dict[str, Any]


class Checkpoints:
    """The folder of the newest checkpoints of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, step: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, then removes older ones, and those of later steps, which are damaged."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write_tensors(path, tensors, notes)
        self._remove_others(path)
        return path

    def save_parts(self, step: int, parts: Mapping[str, Part], notes: Mapping[str, Any], is_first: bool) -> Path:
        """Writes a checkpoint with the parts of all processes, which must call this; removes others as `save` does."""
        from dcnet.training.shard_storage import save_parts

        path = self.folder / f"step-{step:08d}"
        save_parts(path, step, parts, notes)
        if is_first:
            self._remove_others(path)
        return path

    def _remove_others(self, path: Path) -> None:
        files = self.files()
        kept = files[: files.index(path) + 1][-KEPT:]
        for old in files:
            if old not in kept:
                _remove(old)

    def files(self) -> list[Path]:
        """Returns the checkpoints, oldest first: files, and folders of shards."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _FILE.fullmatch(path.name)), key=_step)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest undamaged checkpoint, and a message for each newer, damaged one.

        Raises OSError if a file cannot be read: it may be undamaged, and the resumed run would overwrite it. Raises
        ShardsError for the same reason if shards are missing or do not belong together.
        """
        complaints: list[str] = []
        for path in reversed(self.files()):
            try:
                return _read(path), complaints
            except ShardsError:
                raise
            except ValueError as error:
                complaints.append(str(error))
        return None, complaints

    def clear(self) -> None:
        """Removes all checkpoints, and their folder if it is empty afterwards."""
        for path in self.files():
            _remove(path)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def remove_leftovers(self) -> None:
        """Removes the temporary files of writes that were interrupted."""
        for path in self.folder.glob(".step-*.tmp"):
            _remove(path)


def _read(path: Path) -> Checkpoint:
    """Checks a file, or the files of a folder of shards; the tensors are read later."""
    if path.suffix:
        # A broken link may point to a disk that is not mounted: it is not a damaged file.
        path.stat()
        shards = Shards([TensorFile(path)])
        notes = shards.files[0].notes
    else:
        shards = Shards.in_folder(path)
        notes = shards.notes
    for file in shards.files:
        file.check_sum()
    return Checkpoint(_step(path), shards, notes)


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first, so that no folder with some of its shards remains if the process is killed.
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed.tmp")
    path.replace(hidden)
    shutil.rmtree(hidden)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def check_room(folder: Path, model: nn.Module) -> None:
    """Raises OSError if the disk lacks space for the checkpoints; the folder may not exist yet."""
    # Weights and two moments per checkpoint; one more file exists while it is written.
    values = ((part.local.element_size(), part.size) for part in parts_of(model).values())
    needed = 3 * (KEPT + 1) * sum(size * math.prod(shape) for size, shape in values)
    status = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise OSError(
            f"the disk of {str(folder)!r} has {free / 2**20:.0f} MiB left, but the checkpoints of this run need "
            f"{needed / 2**20:.0f} MiB: free some space, or choose another folder with --runs"
        )


def checkpoint_notes(config: RunConfig, record: Record, seconds: dict[str, float]) -> dict[str, Any]:
    """Returns the values that a checkpoint stores besides its tensors."""
    return {
        "hash": config.hash,
        "config": config.described(),
        "classes": record.data.classes,
        "train_images": record.data.train_images,
        "fingerprint": record.data.fingerprint,
        "network": config.network,
        "curves": record.curves.to_json(),
        "weights": record.weights,
        "seconds": seconds,
        "resumed_at": record.resumed_at,
    }


def resume_record(record: Record, notes: dict[str, Any], step: int, given: str | None = None) -> dict[str, float]:
    """Copies the notes of a checkpoint into a new record, and returns the seconds per phase so far.

    Args:
        record: the record to change.
        notes: the notes of the checkpoint.
        step: the step of the checkpoint.
        given: the hash of the config before a custom network and dataset were added; old checkpoints store this one.
    """
    try:
        curves, resumed_at = Curves.from_json(notes["curves"]), [*notes["resumed_at"], step]
        seconds = dict(notes["seconds"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the checkpoint at step {step} lacks the state of training: remove it") from None
    _check_data(record.data, notes)
    if notes.get("network") is not None and notes["network"] != record.config["network"]:
        raise ValueError(f"the checkpoints of the run belong to another network than {record.config['model']}")
    older = given is not None and "network" not in notes
    if notes.get("hash") != (given if older else record.hash):
        raise ValueError(f"the checkpoints of the run belong to another config, {notes.get('hash')}")
    record.curves, record.resumed_at = curves, resumed_at
    if notes.get("weights") is not None:
        record.weights = notes["weights"]
    return seconds


def _check_data(data: DataDescription, notes: dict[str, Any]) -> None:
    """Raises ValueError if the checkpoints show that the run started with other data."""
    known, found = notes.get("classes"), data.classes
    if known is not None and known != found:
        raise ValueError(
            f"the run started with the classes {some_names(known)}, but the data have {some_names(found)} now"
        )
    count = notes.get("train_images")
    if count is not None and count != data.train_images:
        # With another number of images, the length and the order of epochs would change.
        raise ValueError(f"the run started with {count} training images, but there are {data.train_images} now")
    if notes.get("fingerprint") and notes["fingerprint"] != data.fingerprint:
        raise ValueError(f"the run started with other data than {data.folder or data.name} has now")
