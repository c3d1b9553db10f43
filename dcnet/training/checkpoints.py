"""Checkpoints: one file each, written atomically, with a checksum."""

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
from torch.optim import Optimizer

from dcnet.files import naming, open_regular, write_atomically
from dcnet.layers import Decoupled
from dcnet.training.config import RunConfig
from dcnet.training.identity import some_names
from dcnet.training.record import Curves, DataDescription, Record

KEPT = 2
# Errors of `open_regular` for a missing file and for a pipe.
NO_FILE = (errno.ENOENT, errno.EINVAL)
_FILE = re.compile(r"step-\d+\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a step by name, and notes: JSON values by name."""

    step: int
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Writes tensors and notes into one file, with a checksum over both."""
    dense = _unshare({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    described = json.dumps(notes, allow_nan=False)
    # safetensors writes metadata entries in any order; a single entry makes the file deterministic.
    about = json.dumps({"sum": _sum(dense, described), "notes": described})
    write_atomically(path, save(dense, {"dcnet": about}))


def _unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clones tensors that share memory, such as tied weights, since safetensors cannot store them."""
    found: dict[int, str] = {}
    owner = {name: found.setdefault(value.untyped_storage().data_ptr(), name) for name, value in tensors.items()}
    return {name: value if owner[name] == name else value.clone() for name, value in tensors.items()}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a file that `write_tensors` wrote; raises ValueError if it is missing, damaged or another kind of file.

    Raises OSError if the file exists but cannot be read, since it may be undamaged.
    """
    try:
        return _parsed(path, _content(path))
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error.strerror}") from None


def _content(path: Path) -> bytes:
    """Reads the file without a memory map, since a disk error in a memory map kills the process."""
    with naming(path), open_regular(path) as file:
        return file.read()


def _parsed(path: Path, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = _read_json((header.get("__metadata__") or {}).get("dcnet", "{}"))
    except (SafetensorError, KeyError, ValueError) as error:
        # KeyError: torch does not have the dtype.
        raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error}") from None
    if not isinstance(about.get("notes"), str):
        raise ValueError(
            f"{str(path)!r} was not written by dcnet: expected model.safetensors of a run, or one of its checkpoints"
        )
    if _sum(tensors, about["notes"]) != about.get("sum"):
        raise ValueError(f"{str(path)!r} is damaged: the checksum does not match its contents")
    try:
        return tensors, _read_json(about["notes"])
    except ValueError as error:
        raise ValueError(f"{str(path)!r} has notes that cannot be read: {error}") from None


def _read_json(text: str) -> dict[str, Any]:
    """Parses a JSON object."""
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
    """The folder of the newest checkpoints of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, step: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, then removes older ones, and those of later steps, which are damaged."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write_tensors(path, tensors, notes)
        files = self.files()
        kept = files[: files.index(path) + 1][-KEPT:]
        for old in files:
            if old not in kept:
                old.unlink(missing_ok=True)
        return path

    def files(self) -> list[Path]:
        """Returns the checkpoint files, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _FILE.fullmatch(path.name)), key=_step)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest undamaged checkpoint, and a message for each newer, damaged one.

        Raises OSError if a file cannot be read: it may be undamaged, and the resumed run would overwrite it.
        """
        complaints: list[str] = []
        for path in reversed(self.files()):
            try:
                return Checkpoint(_step(path), *_parsed(path, _content(path))), complaints
            except ValueError as error:
                complaints.append(str(error))
        return None, complaints

    def clear(self) -> None:
        """Removes all checkpoints, and their folder if it is empty afterwards."""
        for path in self.files():
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def remove_leftovers(self) -> None:
        """Removes the temporary files of writes that were interrupted."""
        for path in self.folder.glob(".step-*.tmp"):
            path.unlink(missing_ok=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def check_room(folder: Path, model: nn.Module) -> None:
    """Raises OSError if the disk lacks space for the checkpoints; the folder may not exist yet."""
    # Weights and two moments per checkpoint; one more file exists while it is written.
    needed = 3 * (KEPT + 1) * sum(value.nbytes for value in model.state_dict().values())
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


MODEL, OPTIMIZER = "model.", "optimizer."


def gather(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns all tensors of network and optimizer, gathered if they are sharded; all processes must call this."""
    found = {MODEL + name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{OPTIMIZER}{name}.{key}"] = whole(value)
    return found


@torch.no_grad()
def restore_(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copies gathered tensors into network and optimizer, keeping their memory layout and sharding."""
    load_weights_(model, {name: value for name, value in tensors.items() if name.startswith(MODEL)})
    for name, parameter in model.named_parameters():
        start = f"{OPTIMIZER}{name}."
        kept = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        # Parameter names may share a prefix, but names of optimizer state have no dots.
        own = {key: _placed(value, parameter) for key, value in kept.items() if "." not in key}
        if own:
            optimizer.state[parameter] = own


@torch.no_grad()
def load_weights_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies weights and buffers into the model; names may have the prefix `model.`."""
    given = {name.removeprefix(MODEL): value for name, value in tensors.items()}
    for name, layer in model.named_modules():
        if isinstance(layer, Decoupled):
            # Files of older versions lack the count of batches.
            layer.add_missing_count(given, f"{name}." if name else "")
    own = model.state_dict()
    if own.keys() != given.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise ValueError(f"the weights are of another network: they lack {missing[:3]} and have {unknown[:3]} instead")
    for name, value in own.items():
        if value.shape != given[name].shape:
            raise ValueError(
                f"{name!r} has the shape {list(value.shape)} in this network, but {list(given[name].shape)} in the file"
            )
        value.copy_(_placed(given[name].to(value.dtype), value))


def whole(value: Tensor) -> Tensor:
    """Returns the tensor, gathered if it is sharded; all processes must call this."""
    gathered = getattr(value.detach(), "full_tensor", None)
    return value.detach() if gathered is None else gathered()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """Returns a copy of the tensor on the device of `like`, and sharded like it."""
    if not hasattr(like, "device_mesh"):
        # Fused optimizers require the same memory layout.
        same = value.shape == like.shape
        return torch.empty_like(like, dtype=value.dtype).copy_(value) if same else value.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    if value.dim() == 0:
        return value.to(like.device, copy=True)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(like.device), mesh, placements)
