"""Files of tensors: safetensors with notes and a checksum, written and read whole or tensor by tensor."""

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dcnet.files import atomic_file, naming, open_regular

# Errors of `open_regular` for a missing file and for a pipe.
NO_FILE = (errno.ENOENT, errno.EINVAL)
# The names of dtypes in safetensors files.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# As in safetensors.
LARGEST_HEADER = 100_000_000
# The largest checksum, which reserves the space of the real one.
LARGEST_SUM = 2**32 - 1
# Bytes that are read at once to compute a checksum.
BLOCK = 1 << 22


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Writes tensors and notes into one file, with a checksum over both."""
    layout = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    stream_tensors(path, layout, lambda name: [tensors[name]], notes)


def stream_tensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    pieces_of: Callable[[str], Iterable[Tensor]],
    notes: Mapping[str, Any],
) -> None:
    """Writes the file of `write_tensors` with one piece of a tensor in memory at a time.

    Args:
        path: the file, which is replaced at the end.
        layout: dtype and shape by name.
        pieces_of: returns the rows of a tensor in one or several pieces; called once for each name, in sorted order.
        notes: JSON values by name.
    """
    described = json.dumps(notes, allow_nan=False)
    start = len(_header(layout, LARGEST_SUM, described, 0))
    places, total = _places(layout), zlib.crc32(described.encode())
    with atomic_file(path) as file:
        for name in sorted(layout):
            total = zlib.crc32(name.encode(), total)
            file.seek(start + places[name][0])
            for content in map(_bytes_of, pieces_of(name)):
                total = zlib.crc32(content, total)
                file.write(content)
        file.seek(0)
        file.write(_header(layout, total, described, start))


def _header(layout: Mapping[str, tuple[torch.dtype, Sequence[int]]], total: int, notes: str, size: int) -> bytes:
    """The header of a file with this checksum, padded with spaces to the size."""
    # safetensors writes metadata entries in any order; a single entry makes the file deterministic.
    header: dict[str, Any] = {"__metadata__": {"dcnet": json.dumps({"sum": total, "notes": notes})}}
    for name, (begin, end) in _places(layout).items():
        dtype, shape = layout[name]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    padded = max(size - 8, -(-len(text) // 8) * 8)
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _places(layout: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """The first and last byte of each tensor; large items come first, so that all are aligned."""
    found: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(layout, key=lambda name: (-layout[name][0].itemsize, name)):
        dtype, shape = layout[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        found[name] = begin, end
    return found


def _bytes_of(value: Tensor) -> memoryview:
    # As bytes, since numpy has no bfloat16.
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a file that `write_tensors` wrote; raises ValueError if it is missing, damaged or another kind of file.

    Raises OSError if the file exists but cannot be read, since it may be undamaged.
    """
    file = TensorFile(path)
    tensors = {name: file.read(name) for name in file.tensors}
    file.compare_sum(_sum(tensors, file.text))
    return tensors, file.notes


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
        total = zlib.crc32(_bytes_of(tensors[name]), zlib.crc32(name.encode(), total))
    return total


@dataclass(frozen=True)
class StoredTensor:
    """Dtype, shape and first byte of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file that `write_tensors` wrote, of which only the header is read at first.

    Raises ValueError if the file is missing or not such a file. There is no memory map, since a disk error in one kills
    the process.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with naming(path), open_regular(path) as file:
                size, header = os.fstat(file.fileno()).st_size, self._read_header(file)
                self.tensors = {name: _stored(header[name], file.tell(), size) for name in sorted(header)}
                if sum(stored.nbytes for stored in self.tensors.values()) > size - file.tell():
                    raise ValueError("its tensors overlap")
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error}") from None
        if not isinstance(self._about.get("notes"), str):
            expected = "expected model.safetensors of a run, or one of its checkpoints"
            raise ValueError(f"{str(path)!r} was not written by dcnet: {expected}")
        self.text: str = self._about["notes"]
        try:
            self.notes = _read_json(self.text)
        except ValueError as error:
            raise ValueError(f"{str(path)!r} has notes that cannot be read: {error}") from None

    def _read_header(self, file: BinaryIO) -> dict[str, Any]:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"its header has {length:,} bytes")
        header = _read_json(file.read(length).decode())
        self._about = _read_json((header.pop("__metadata__", None) or {}).get("dcnet", "{}"))
        return header

    def check_sum(self) -> None:
        """Raises ValueError if the checksum does not match; reads the file block by block."""
        total = zlib.crc32(self.text.encode())
        with naming(self.path), open_regular(self.path) as file:
            for name, stored in self.tensors.items():
                total = _add_block_sums(file, stored, zlib.crc32(name.encode(), total))
        self.compare_sum(total)

    def compare_sum(self, total: int) -> None:
        """Raises ValueError if this is not the checksum in the file."""
        if total != self._about.get("sum"):
            raise ValueError(f"{str(self.path)!r} is damaged: the checksum does not match its contents")

    def read(self, name: str, offsets: Sequence[int] = (), lengths: Sequence[int] = ()) -> Tensor:
        """Reads a tensor, or the part of it at these offsets; of the first dimension, only those rows are read."""
        stored = self.tensors[name]
        shape, row = list(stored.shape), stored.nbytes // max(stored.shape[0], 1) if stored.shape else 0
        first = offsets[0] if offsets else 0
        if lengths:
            shape[0] = lengths[0]
        content = torch.empty(shape, dtype=stored.dtype)
        with naming(self.path), open_regular(self.path) as file:
            file.seek(stored.begin + first * row)
            if file.readinto(_bytes_of(content)) != content.nbytes:
                raise ValueError(f"{str(self.path)!r} is damaged: it ends before its last tensor")
        for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            content = content.narrow(dimension, start, length) if dimension else content
        return content


def _stored(described: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    """Checks an entry of the header; the tensors start at byte `start`, and the file has `size` bytes."""
    dtype, (begin, end) = DTYPES[described["dtype"]], described["data_offsets"]
    shape = tuple(described["shape"])
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"shape and offsets must be whole numbers, not {described}")
    found = StoredTensor(dtype, shape, start + begin)
    if found.nbytes != end - begin or start + end > size:
        raise ValueError("it ends before its last tensor, or its header is wrong")
    return found


def _add_block_sums(file: BinaryIO, stored: StoredTensor, total: int) -> int:
    file.seek(stored.begin)
    left = stored.nbytes
    while left and (block := file.read(min(left, BLOCK))):
        total, left = zlib.crc32(block, total), left - len(block)
    return total
