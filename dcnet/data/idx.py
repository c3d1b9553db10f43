"""The idx format: a magic number, the sizes of all dimensions, and then the bytes."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dcnet.data.download import broken

# What tells an array of unsigned bytes; the number of its dimensions is added.
UNSIGNED_BYTES = 0x800


def read_idx(path: Path, dimensions: int, url: str) -> Tensor:
    """The bytes of an idx file in their shape; all sizes are checked, and errors name the URL of a better file."""
    content, start = _content(path, url), 4 + 4 * dimensions
    magic = struct.pack(">I", UNSIGNED_BYTES + dimensions)
    if content[:4] != magic:
        raise broken(path, f"expected the magic number {magic.hex()}, found {content[:4].hex() or 'nothing'}", url)
    if len(content) < start:
        raise broken(path, f"expected {start} bytes of sizes, found {len(content)}", url)
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = start + math.prod(shape)
    if len(content) != size or not shape[0]:
        raise broken(path, f"expected one entry or more and {size} bytes for {shape[0]}, found {len(content)}", url)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _content(path: Path, url: str) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, OSError, zlib.error) as error:
        raise broken(path, f"expected a whole file, gzipped if it ends with .gz, found that {error}", url) from error
