"""The idx format: a magic number, the sizes of all dimensions, and then the bytes."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from dcnet.data.download import broken
from dcnet.files import open_regular

Stream = BinaryIO | gzip.GzipFile

# What tells an array of unsigned bytes; the number of its dimensions is added.
UNSIGNED_BYTES = 0x800
# More than any data set of this format has: 60,000 images of 28 x 28 are 47 MB.
LARGEST = 200_000_000


def read_idx(path: Path, dimensions: int, url: str) -> Tensor:
    """The bytes of an idx file in their shape; all sizes are checked, and errors name the URL of a better file."""
    try:
        with open_regular(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
            shape = _shape(stream, dimensions, path, url)
            content = _content(stream, shape, path, url)
    except (EOFError, OSError, zlib.error) as error:
        raise broken(path, f"expected a whole file, gzipped if it ends with .gz, found that {error}", url) from error
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape).copy())


def _shape(stream: Stream, dimensions: int, path: Path, url: str) -> tuple[int, ...]:
    start, magic = 4 + 4 * dimensions, struct.pack(">I", UNSIGNED_BYTES + dimensions)
    head = stream.read(start)
    if head[:4] != magic:
        raise broken(path, f"expected the magic number {magic.hex()}, found {head[:4].hex() or 'nothing'}", url)
    if len(head) < start:
        raise broken(path, f"expected {start} bytes of sizes, found {len(head)}", url)
    return struct.unpack(f">{dimensions}I", head[4:])


def _content(stream: Stream, shape: tuple[int, ...], path: Path, url: str) -> bytes:
    """What follows the sizes, and nothing beyond it, however much a gzipped file would become."""
    size, start = math.prod(shape), 4 + 4 * len(shape)
    if size > LARGEST:
        raise broken(path, f"expected at most {LARGEST:,} bytes, found the sizes of {size:,}", url)
    content = stream.read(size + 1)
    if len(content) != size or not shape[0]:
        found = f"{start + len(content)}{' or more' if len(content) > size else ''}"
        raise broken(path, f"expected one entry or more and {start + size} bytes for {shape[0]}, found {found}", url)
    return content
