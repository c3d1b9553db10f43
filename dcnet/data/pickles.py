"""Pickles of arrays and plain values, read without running anything that they ask for."""

import _codecs
import io
import math
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np

from dcnet.data.download import broken

# Opcodes that nobody needs for arrays and plain values, and that take memory or time without end: room for bytes that
# need not follow, and containers that hash all that is in them.
REFUSED = {"BYTEARRAY8", "DUP", "EMPTY_SET", "ADDITEMS", "FROZENSET"}
PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
GET = {"GET", "BINGET", "LONG_BINGET"}
# How often a tuple may be put into another place: tuples of tuples that are the same double with every level when they
# are hashed, and with so many the most that they come to is no trouble.
MOST_SHARED = 32


def _text(value: Any) -> str:
    """Text of Python 2 arrives as bytes."""
    if not isinstance(value, bytes | str | int):
        # Containers that hold each other many times would become a text without end.
        raise pickle.UnpicklingError(f"a {type(value).__name__} is where a name should be")
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class PlainType:
    """Stands in for numpy's dtype, which a crafted state can make read memory as if it were objects."""

    def __init__(self, name: Any, *flags: Any):
        self.name = _text(name)
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", self.name):
            raise pickle.UnpicklingError(f"arrays of {self.name!r} are not plain numbers")

    def __setstate__(self, state: Any) -> None:
        self.name = re.sub(r"[^<>]", "", _text(state[1])) + self.name

    def values(self, content: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
        kind, sizes = np.dtype(self.name), tuple(int(size) for size in shape)
        if type(content) is not bytes or len(content) != math.prod(sizes) * kind.itemsize:
            raise pickle.UnpicklingError(f"an array of {sizes} {kind} does not have the bytes that it should have")
        return np.frombuffer(content, kind).reshape(sizes, order=order)


class PlainArray:
    """Stands in for numpy's array, which it holds once it has got its state."""

    def __init__(self, *how: Any):
        self.array: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.array = PlainType.values(kind, content, shape, "F" if by_columns else "C")


class PlainNumber:
    """Stands in for what makes numpy's numbers; they become Python's."""

    def __new__(cls, kind: PlainType, content: Any) -> Any:
        return PlainType.values(kind, content, ()).item()


ADMITTED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _codecs.encode,
    ("numpy", "dtype"): PlainType,
    ("numpy", "ndarray"): PlainArray,
    # The old and the new name of the same module.
    ("numpy.core.multiarray", "_reconstruct"): PlainArray,
    ("numpy._core.multiarray", "_reconstruct"): PlainArray,
    ("numpy.core.multiarray", "scalar"): PlainNumber,
    ("numpy._core.multiarray", "scalar"): PlainNumber,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is none of these")
        return ADMITTED[module, name]


def _check_size(content: bytes) -> None:
    """Refuses a pickle that would take much more memory or time than its bytes, before anything of it is loaded."""
    places: list[bool] = []
    before, shared = "", 0
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in REFUSED:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}")
        if opcode.name in PUT and argument > count:
            # All places up to that one are made at once.
            raise pickle.UnpicklingError(f"it remembers {argument:,} values after {count} operations")
        if opcode.name in PUT or opcode.name == "MEMOIZE":
            place = len(places) if opcode.name == "MEMOIZE" else argument
            places += [False] * (place + 1 - len(places))
            places[place] = "TUPLE" in before
        shared += opcode.name in GET and places[argument : argument + 1] == [True]
        if shared > MOST_SHARED:
            raise pickle.UnpicklingError(f"it has tuples in more than {MOST_SHARED} places beside their own")
        before = opcode.name


def load_table(content: bytes, path: Path | str, url: str) -> dict[str, Any]:
    """The dictionary in a pickle, by names, with arrays, texts, numbers and containers of them in it."""
    try:
        _check_size(content)
        table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if type(table) is not dict:
            raise TypeError(f"it is a {type(table).__name__}")
        return {_text(key): value.array if isinstance(value, PlainArray) else value for key, value in table.items()}
    except Exception as error:
        # What is no pickle can end in any error at all.
        problem = f"expected a pickled dictionary of arrays and plain values, but {error or type(error).__name__}"
        raise broken(path, problem, url) from error
