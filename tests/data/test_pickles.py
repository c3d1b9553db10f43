"""Pickles are read as data: executable content is rejected by name and not executed."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.data_files import python2_pickle, sentence_of
from hypothesis import given
from hypothesis import strategies as st

from dcnet.data.download import naming_source
from dcnet.data.pickles import load_table


class Call:
    """Pickles as a function call."""

    def __init__(self, function: object, *arguments: object):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class Imitation(dict):
    """Pickles as an object of this class."""


def read(content: bytes) -> None:
    with naming_source(Path("some/file"), "https://example.org/file"):
        load_table(content)


def error_of(content: bytes) -> str:
    message = sentence_of(lambda: read(content))
    assert message.startswith(
        "some/file cannot be used: expected a pickled dictionary of arrays and plain values, but "
    )
    assert "https://example.org/file" in message
    return message


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("depth", ["outside", "inside", "deep inside", "as a key"])
def test_calls_are_rejected_and_not_executed(protocol: int, depth: str, tmp_path: Path):
    mark = tmp_path / "ran"
    for function, arguments, name in (
        (os.system, (f"touch {mark}",), f"{os.system.__module__}.system"),
        (eval, (f"open({str(mark)!r}, 'w')",), "eval"),
        (exec, (f"open({str(mark)!r}, 'w')",), "exec"),
        (getattr, ("", "join"), "getattr"),
        (pickle.loads, (pickle.dumps(Call(os.system, f"touch {mark}")),), "pickle.loads"),
    ):
        evil = Call(function, *arguments)
        value = {
            "outside": evil,
            "inside": {"data": evil},
            "deep inside": {"data": np.zeros(3, np.uint8), "labels": [1, {"x": (2, [evil])}]},
            "as a key": {"data": 1, (evil,): 2},
        }[depth]
        message = error_of(pickle.dumps(value, protocol))
        assert "it contains " in message
        assert name in message
        assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        # The same with opcodes that pickle no longer writes.
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02cos\nsystem\n)\x81.",
    ],
)
def test_every_importing_opcode_is_rejected(content: bytes):
    assert "it contains os.system" in error_of(content)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "fromfile"),
        ("numpy", "load"),
        ("numpy", "core"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy._core.multiarray", "_reconstruct.__globals__"),
        ("numpy._core._multiarray_umath", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("_codecs", "decode"),
        ("codecs", "encode"),
        ("builtins", "print"),
        ("__builtin__", "eval"),
        ("copy_reg", "_reconstructor"),
    ],
)
def test_names_similar_to_allowed_ones_are_rejected(module: str, name: str):
    content = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    assert f"it contains {module}.{name}" in error_of(content + b"\x93.")


def test_other_classes_and_persistent_ids_are_rejected():
    assert "Imitation" in error_of(pickle.dumps(Imitation(data=1)))
    error_of(b"\x80\x02}(X\x01\x00\x00\x00aPname\nu.")


def object_array(flags: int) -> bytes:
    """An array of type object, with addresses chosen by the file."""
    whole = python2_pickle({"data": np.zeros(2, np.int64)})
    crafted = whole.replace(b"T\x02\x00\x00\x00i8", b"T\x02\x00\x00\x00O8")
    assert crafted != whole
    return crafted.replace(b"J" + struct.pack("<i", 0) + b"tb\x89", b"J" + struct.pack("<i", flags) + b"tb\x89")


@pytest.mark.parametrize("flags", [0, 63])
def test_object_arrays_are_rejected(flags: int):
    assert "arrays of 'O8' are not plain numbers" in error_of(object_array(flags))


def test_array_sizes_are_checked():
    whole = python2_pickle({"data": np.zeros((2, 3), np.uint8)})
    shape = b"(J" + struct.pack("<i", 2) + b"J" + struct.pack("<i", 3) + b"t"
    for sizes in ((2, 4), (2, 2), (10**9, 10**9), (-1, 6), (-2, -3)):
        other = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in sizes) + b"t"
        error_of(whole.replace(shape, other))


@pytest.mark.parametrize("protocol", range(5))
def test_numpy_pickles_are_read(protocol: int):
    values = {
        "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "swapped": np.arange(3, dtype=">i4"),
        "label": np.int64(-7),
        "labels": [1, 2],
        "name": "ä",
        "raw": b"\xff\x00",
    }
    found = load_table(pickle.dumps(values, protocol))
    assert found.keys() == values.keys()
    for name in ("data", "columns", "swapped"):
        assert found[name].dtype == values[name].dtype
        assert np.array_equal(found[name], values[name])
    assert (found["label"], type(found["label"])) == (-7, int)
    assert (found["labels"], found["name"], found["raw"]) == ([1, 2], "ä", b"\xff\x00")


def test_python_2_pickles_are_read():
    images = np.arange(24, dtype=np.uint8).reshape(4, 6)
    for array in (images, np.asfortranarray(images)):
        found = load_table(python2_pickle({"data": array, "labels": [3, 1], "name": "x"}))
        assert np.array_equal(found["data"], images)
        assert (found["labels"], found["name"]) == ([3, 1], b"x")


def outcome(content: bytes) -> str:
    try:
        found = load_table(content)
    except ValueError as error:
        return "an error" if str(error).startswith("expected a pickled dictionary") else str(error)
    return "a table" if type(found) is dict else type(found).__name__


@given(st.binary(max_size=60))
def test_random_bytes_raise_no_other_error(content: bytes):
    assert outcome(content) in ("a table", "an error")


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_changed_bytes_raise_no_other_error(at: int, value: int):
    content = bytearray(python2_pickle({"data": np.arange(6, dtype=np.uint8), "labels": [3, 1]}))
    content[at % len(content)] = value
    assert outcome(bytes(content)) in ("a table", "an error")
