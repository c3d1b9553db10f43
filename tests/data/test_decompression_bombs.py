"""Small files that would be large in memory are rejected by their sizes, before memory is allocated."""

import gzip
import json
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

# One process for all files, since it takes seconds to start; `room` is the memory it may allocate.
READ_ALL = """
import json, resource, sys
from pathlib import Path
from dcnet.data.download import read_archive
from dcnet.data.mnist import read_idx
from dcnet.data.decode import open_image
from dcnet.data.pickles import load_table
from dcnet.files import read_json

folder, room = Path(sys.argv[1]), int(sys.argv[2])
readers = {
    ".pickle": lambda path: load_table(path.read_bytes()),
    ".gz": lambda path: read_idx(path, 3),
    ".tgz": lambda path: read_archive(path, "folder", ["file"]),
    ".json": read_json,
    ".jpg": open_image,
}
open_image(folder / "small.png")
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + room
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
outcomes = {}
for path in sorted(folder.iterdir()):
    try:
        outcomes[path.name] = f"read as {readers.get(path.suffix, open_image)(path)!r:.60}"
    except Exception as error:
        outcomes[path.name] = f"{type(error).__name__}: {error}"
print(json.dumps(outcomes))
"""
ROOM = 300 << 20


def gzipped_zeros(head: bytes) -> bytes:
    """A header and a gigabyte of zeros; concatenated gzip files are read as one."""
    return gzip.compress(head) + 64 * gzip.compress(bytes(16 << 20))


def tar_header(kind: bytes, size: int) -> bytes:
    fields = [b"name".ljust(100, b"\0"), b"0000644\0", b"0000000\0" * 2, b"%011o\0" % size, b"0" * 11 + b"\0"]
    rest = kind + bytes(100) + b"ustar  \0" + bytes(247)
    total = sum(b"".join(fields)) + sum(rest) + 8 * 32
    return b"".join(fields) + b"%06o\0 " % total + rest


def png_of(width: int, height: int) -> bytes:
    """The header of a PNG of that size, with a few rows."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9999)))]
    body = b"".join(struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def nested_tuples(depth: int) -> bytes:
    """A dictionary key of nested pairs of the same tuple: hashing takes 2^depth steps."""
    levels = b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(depth))
    return b"\x80\x02})q\x00" + levels + b"K\x01s."


BOMBS = {
    "memo.pickle": b"\x80\x02}r\xff\xff\xff\x0f.",
    "text-memo.pickle": b"}p268435455\n.",
    "array.pickle": b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".",
    "tuples.pickle": nested_tuples(60),
    "long.pickle": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "zeros.gz": gzipped_zeros(b"\0\0\x08\x03" + struct.pack(">III", 5, 28, 28)),
    "sizes.gz": gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 0xFFFFFFFF, 28, 28)),
    "name.tgz": gzipped_zeros(tar_header(b"L", 1 << 30)),
    "attributes.tgz": gzipped_zeros(tar_header(b"x", 1 << 30)),
    "long.tgz": gzip.compress(tar_header(b"0", 1 << 31)),
    "names.tgz": gzip.compress(tar_header(b"L", 5) + b"hello".ljust(512, b"\0")) * 3000,
    "photo.jpg": png_of(13000, 13000),
    "wide.jpg": png_of(2_000_000_000, 2_000_000_000),
    "deep.json": b"[" * 100_000,
    "digits.json": b"1" * 1_000_000,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the memory that a process has is read from /proc")
def test_bombs_are_rejected_in_one_sentence_without_their_memory(tmp_path: Path):
    for name, content in BOMBS.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 32)
    Image.new("RGB", (4, 4)).save(tmp_path / "small.png")
    command = [sys.executable, "-c", READ_ALL, str(tmp_path), str(ROOM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.pop("small.png").startswith("read as <PIL.Image")
    assert set(outcomes) == {*BOMBS, "large.json"}
    for name, sentence in outcomes.items():
        assert sentence.startswith("ValueError: "), (name, sentence)
        assert "\n" not in sentence
        assert len(sentence) < 400, name
    assert "it has 13000 x 13000 pixels, and 100,000,000 is the limit" in outcomes["photo.jpg"]
    assert "it has a header of 1,073,741,824 bytes" in outcomes["name.tgz"]
    assert "it stores memo entry 268,435,455 after 2 operations" in outcomes["memo.pickle"]
    assert "expected 3936 bytes for 5 entries, and at least one entry, found 3937 or more" in outcomes["zeros.gz"]


def test_pickles_with_shared_values_are_read():
    """As pickle writes them, with memo entries."""
    from dcnet.data.pickles import load_table

    text = "the same"
    table = {"labels": [1, 2], "names": [text] * 300, "more": {"a": (1, 2), "b": (1, 2)}}
    for protocol in range(6):
        assert load_table(pickle.dumps(table, protocol)) == table
