"""Tiny files in the formats of the datasets, written byte by byte."""

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


def sentence_of(work: Callable[[], object]) -> str:
    """The message of the ValueError that it raises, which must be one line."""
    with pytest.raises(ValueError, match=r".") as error:
        work()
    assert "\n" not in str(error.value)
    return str(error.value)


RANDOM = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim])
    return head + b"".join(struct.pack(">I", size) for size in array.shape) + array.tobytes()


def mnist_arrays(train: int = 12, test: int = 5) -> dict[str, np.ndarray]:
    return {
        "train-images-idx3-ubyte": pixels(train, 28, 28),
        "train-labels-idx1-ubyte": (np.arange(train) * 3 % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": pixels(test, 28, 28),
        "t10k-labels-idx1-ubyte": (np.arange(test) % 10).astype(np.uint8),
    }


def write_mnist(folder: Path, arrays: dict[str, np.ndarray], packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        content = idx(array)
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)


def cifar_arrays(name: str, per_file: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images [N, 3072] and labels [N] of each file, named without suffix."""
    files = {"cifar10": [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], "cifar100": ["train", "test"]}[name]
    classes = 10 if name == "cifar10" else 100
    return {file: (pixels(per_file, 3072), RANDOM.integers(0, classes, per_file)) for file in files}


def cifar_binary(name: str, images: np.ndarray, labels: np.ndarray) -> bytes:
    records = b""
    for image, label in zip(images, labels, strict=True):
        coarse = b"" if name == "cifar10" else bytes([int(label) // 5])
        records += coarse + bytes([int(label)]) + image.tobytes()
    return records


def cifar_python(name: str, images: np.ndarray, labels: np.ndarray) -> bytes:
    numbers = [int(label) for label in labels]
    if name == "cifar10":
        return python2_pickle(
            {"batch_label": "batch 1 of 5", "labels": numbers, "data": images, "filenames": ["a.png"]}
        )
    return python2_pickle({"fine_labels": numbers, "coarse_labels": [n // 5 for n in numbers], "data": images})


def cifar_files(name: str, layout: str) -> tuple[str, dict[str, bytes], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The folder's name, the contents of its files, and their arrays."""
    arrays = cifar_arrays(name)
    if layout == "binary":
        folder = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name]
        return folder, {f"{file}.bin": cifar_binary(name, *parts) for file, parts in arrays.items()}, arrays
    folder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    return folder, {file: cifar_python(name, *parts) for file, parts in arrays.items()}, arrays


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def tar_gz(folder: str, contents: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def python2_pickle(value: object) -> bytes:
    """A pickle as written by Python 2 and numpy: protocol 2, with byte strings."""
    return b"\x80\x02" + _pickled(value) + b"."


def _pickled(value: object) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_pickled(key) + _pickled(entry) for key, entry in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(_pickled(entry) for entry in value) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(_pickled(entry) for entry in value) + b"t"
    if isinstance(value, np.ndarray):
        return _pickled_array(value)
    if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(text)) + text
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    return b"J" + struct.pack("<i", value)


def _pickled_array(array: np.ndarray) -> bytes:
    kind = array.dtype.str
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _pickled((0,)) + _pickled("b") + b"tR"
    dtype = b"cnumpy\ndtype\n" + _pickled((kind[1:], 0, 1)) + b"R"
    dtype += _pickled((3, kind[0], None, None, None, -1, -1, 0)) + b"b"
    by_columns = not array.flags.c_contiguous
    content = array.tobytes(order="F" if by_columns else "C")
    return made + b"(" + _pickled(1) + _pickled(array.shape) + dtype + _pickled(by_columns) + _pickled(content) + b"tb"
