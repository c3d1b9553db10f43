"""The files of a sharded checkpoint: one per process, in one folder, which any number of processes can read."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.losses.collectives import rank_of
from dcnet.training.processes import agree
from dcnet.training.tensor_files import TensorFile

_SHARD = re.compile(r"shard-(\d+)-of-(\d+)\.safetensors")


class ShardsError(ValueError):
    """The files of a sharded checkpoint do not belong together, or some are missing; the message names the file."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this process holds: the values, their offsets, and the shape of the whole tensor."""

    local: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor, first: int = 0, rows: int | None = None) -> "Part":
        """The part of a DTensor, or of a tensor of which this process holds some rows; by default all of it."""
        if hasattr(value, "__create_chunk_list__"):
            (chunk,) = value.__create_chunk_list__()
            return cls(value.to_local(), tuple(chunk.offsets), tuple(value.shape))  # type: ignore[attr-defined]
        shape = tuple(value.shape)
        if rows is None:
            return cls(value, (0,) * len(shape), shape)
        return cls(value, (first, *[0] * (len(shape) - 1)), (rows, *shape[1:]))

    def copy_(self, whole: Tensor) -> None:
        """Copies the values of this part from the whole tensor."""
        lengths = zip(self.offsets, self.local.shape, strict=True)
        self.local.copy_(whole[tuple(slice(offset, offset + length) for offset, length in lengths)])


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor in a file: its offsets in the whole tensor, and its shape."""

    file: TensorFile
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def shard_name(shard: int, count: int) -> str:
    return f"shard-{shard}-of-{count}.safetensors"


class Shards:
    """The files of a sharded checkpoint, of which only the headers are read at first.

    Raises ShardsError if the files do not belong together, and ValueError if one is damaged.

    Args:
        files: the files of one checkpoint, or a single file of whole tensors.
    """

    def __init__(self, files: Sequence[TensorFile]):
        self.files = files
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.parts: dict[str, list[StoredPart]] = {}
        for file in files:
            for name in file.tensors:
                self._add(file, name)
        for name, parts in self.parts.items():
            if sum(math.prod(part.lengths) for part in parts) != math.prod(self.sizes[name]):
                raise ShardsError(f"the shards beside {str(files[0].path)!r} do not have all values of {name!r}")

    @classmethod
    def in_folder(cls, folder: Path) -> "Shards":
        """The shards of a step in the folder that `save_parts` wrote."""
        files = [TensorFile(path) for path in _shard_paths(folder)]
        first = files[0]
        for number, file in enumerate(files):
            if file.notes.get("shard") != number or file.notes.get("of") != len(files):
                raise ShardsError(f"{str(file.path)!r} was renamed after it was written: restore its name")
            steps = f"step {file.notes.get('step')}, but {str(first.path)!r} of step {first.notes.get('step')}"
            if any(file.notes.get(key) != first.notes.get(key) for key in ("step", "save")):
                raise ShardsError(f"{str(file.path)!r} is of {steps}: all shards must belong to one save")
        return cls(files)

    def _add(self, file: TensorFile, name: str) -> None:
        stored, places = file.tensors[name], file.notes.get("parts")
        try:
            whole = {"offsets": [0] * len(stored.shape), "size": stored.shape}
            offsets, size = _place(whole if places is None else places[name], stored.shape)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{str(file.path)!r} does not say which part of {name!r} it has") from None
        known = self.sizes.setdefault(name, size), self.dtypes.setdefault(name, stored.dtype)
        if known != (size, stored.dtype):
            raise ShardsError(f"{str(file.path)!r} has {name!r} in another shape than {str(self.files[0].path)!r}")
        self.parts.setdefault(name, []).append(StoredPart(file, offsets, stored.shape))

    @property
    def notes(self) -> dict[str, Any]:
        """The notes of the checkpoint."""
        return dict(self.files[0].notes.get("notes") or {})

    def check_sums(self, group: Any = None) -> None:
        """Raises ValueError in all processes if a file is damaged; each process reads some of the files."""
        rank, world = rank_of(group)

        def check() -> None:
            for file in self.files[rank::world]:
                file.check_sum()

        agree(check, group)

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor, which is in memory once, besides one part of it."""
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0].file.read(name)
        whole = torch.empty(self.sizes[name], dtype=self.dtypes[name])
        for part in parts:
            target = whole
            for dimension, (offset, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
                target = target.narrow(dimension, offset, length)
            target.copy_(part.file.read(name))
        return whole


def _shard_paths(folder: Path) -> list[Path]:
    """The files of all shards in a folder; raises ShardsError if some are missing or their numbers differ."""
    found = {path.name: match for path in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(path.name))}
    counts = sorted({int(match[2]) for match in found.values()})
    if len(counts) != 1:
        what = "no shards" if not counts else f"shards of {' and of '.join(map(str, counts))} processes"
        raise ShardsError(f"{str(folder)!r} has {what}: a checkpoint must have the shards of one save")
    names = [shard_name(shard, counts[0]) for shard in range(counts[0])]
    if missing := [name for name in names if name not in found]:
        raise ShardsError(f"{str(folder / missing[0])!r} is missing: the checkpoint needs all {counts[0]} shards")
    return [folder / name for name in names]


def _place(described: Mapping[str, Any], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the whole tensor, as a shard describes them; raises ValueError if they are impossible."""
    offsets, size = (tuple(map(int, described[key])) for key in ("offsets", "size"))
    ends = zip(offsets, shape, size, strict=True)
    if not all(offset >= 0 and offset + length <= total for offset, length, total in ends):
        raise ValueError("a part must be inside the whole tensor")
    return offsets, size


def check_parts(shards: Shards, parts: Mapping[str, Part]) -> None:
    """Raises ValueError if the checkpoint lacks a tensor, or has it in another shape."""
    sizes, path = shards.sizes, str(shards.files[0].path)
    for name, part in parts.items():
        if name not in sizes:
            raise ValueError(f"{path!r} is of another network: it lacks {name!r}")
        if sizes[name] != part.size:
            raise ValueError(
                f"{name!r} has the shape {list(part.size)} in this network, but {list(sizes[name])} in {path!r}"
            )
