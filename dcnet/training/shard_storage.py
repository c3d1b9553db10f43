"""Sharded checkpoints by torch.distributed.checkpoint, which plans what each process writes and reads.

The files are those of `dcnet.training.shards`, so that nothing is unpickled.
"""

import dataclasses
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dcnet.training.processes import agree
from dcnet.training.shards import Part, Shards, check_parts, shard_name
from dcnet.training.tensor_files import write_tensors


class PartSavePlanner(DefaultSavePlanner):
    """Plans what each process writes: its parts; what all processes hold is written by the first."""

    def __init__(self, parts: Mapping[str, Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.parts = parts

    def create_local_plan(self) -> SavePlan:
        # A process may hold nothing of a tensor with fewer rows than processes.
        held = {name: part for name, part in self.parts.items() if part.local.numel() or not math.prod(part.size)}
        self.plan = SavePlan([_write_item(name, part) for name, part in held.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.fqn].local


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(part.offsets), part.local.shape)


def _write_item(name: str, part: Part) -> WriteItem:
    properties = TensorProperties.create_from_tensor(part.local)
    data = TensorWriteData(_chunk(part), properties, Size(part.size))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans what each process reads: its parts."""

    def __init__(self, parts: Mapping[str, Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.parts.items():
            described: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, described, [_chunk(part)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.fqn].local


class ShardWriter(StorageWriter):
    """Writes one file per process into a temporary folder, which gets its name when all files are complete."""

    def __init__(self, folder: Path, step: int, notes: Mapping[str, Any]):
        self.folder, self.step, self.notes = folder, step, notes
        self.temporary = folder.with_name(f".{folder.name}.tmp")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing; a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing; the first process creates the folder in `prepare_global_plan`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        unique, count = uuid.uuid4().hex, len(plans)
        about = [{"step": self.step, "shard": shard, "of": count, "save": unique} for shard in range(count)]
        return [dataclasses.replace(plan, storage_data=own) for plan, own in zip(plans, about, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        about: dict[str, Any] = {**plan.storage_data, "parts": {}}
        tensors: dict[str, Any] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            tensors[item.index.fqn] = planner.resolve_data(item)
            place = {"offsets": list(item.tensor_data.chunk.offsets), "size": list(item.tensor_data.size)}
            about["parts"][item.index.fqn] = place
        if about["shard"] == 0:
            about["notes"] = dict(self.notes)
        write_tensors(self.temporary / shard_name(about["shard"], about["of"]), tensors, about)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for shard in range(len(results)):
            if not (self.temporary / shard_name(shard, len(results))).exists():
                raise OSError(
                    f"process {shard} wrote its part of {str(self.folder)!r} to another disk: "
                    "the folder of a run must be on a disk that all machines share"
                )
        replaced = self.folder.with_name(f".{self.folder.name}.replaced.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.folder.exists():
            self.folder.replace(replaced)
        self.temporary.replace(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _metadata(shards: Shards) -> Metadata:
    """The tensors of a checkpoint and their parts, for the planner."""
    found: dict[str, Any] = {}
    for name, stored in shards.parts.items():
        chunks = [ChunkStorageMetadata(Size(part.offsets), Size(part.lengths)) for part in stored]
        properties = TensorProperties(shards.dtypes[name])
        found[name] = TensorStorageMetadata(properties, Size(shards.sizes[name]), chunks)
    return Metadata(found)


class ShardReader(StorageReader):
    """Reads the rows that a process needs from the files of a checkpoint."""

    def __init__(self, shards: Shards):
        self.shards = shards

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing; a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _metadata(self.shards)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing; `Shards` has read the headers."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, number = item.storage_index.fqn, item.storage_index.index
            assert number is not None
            file, target = self.shards.parts[name][number].file, planner.resolve_tensor(item).detach()
            target.copy_(file.read(name, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save_parts(folder: Path, step: int, parts: Mapping[str, Part], notes: Mapping[str, Any], group: Any = None) -> None:
    """Writes the parts of all processes into a new folder, all of them or none; all processes must call this."""
    with _plain_errors():
        state: dict[str, Any] = dict.fromkeys(parts)
        save(
            state, storage_writer=ShardWriter(folder, step, notes), planner=PartSavePlanner(parts), process_group=group
        )


def load_parts(shards: Shards, parts: Mapping[str, Part], group: Any = None) -> None:
    """Copies the values of a checkpoint into the parts; all processes must call this.

    Before anything is copied, raises ValueError in all processes if a tensor is missing or has another shape.
    """
    agree(lambda: check_parts(shards, parts), group)
    with _plain_errors():
        state: dict[str, Any] = dict.fromkeys(parts)
        load(state, storage_reader=ShardReader(shards), planner=PartLoadPlanner(parts), process_group=group)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises the error of the first process that failed, instead of an exception with the tracebacks of all."""
    try:
        with warnings.catch_warnings():
            # torch warns in a single process, where no torch.distributed is needed.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as failed:
        raise next(iter(failed.failures.values()))[0] from None
