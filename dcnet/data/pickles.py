"""Pickles of arrays and plain values, read without executing anything in them."""

import _codecs
import io
import math
import pickle
import pickletools
import re
from typing import Any

import numpy as np

# Opcodes that arrays and plain values do not need, and that can take unlimited memory or time: buffers whose bytes need
# not follow, and containers that hash their content.
FORBIDDEN = {"BYTEARRAY8", "DUP", "EMPTY_SET", "ADDITEMS", "FROZENSET"}
PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
GET = {"GET", "BINGET", "LONG_BINGET"}
# References to an existing tuple: hashing nested shared tuples takes time exponential in their number.
MAX_SHARED = 32


def _text(value: Any) -> str:
    """A key as text; Python 2 strings arrive as bytes."""
    if not isinstance(value, bytes | str | int):
        # The text of containers that refer to each other can be endless.
        raise pickle.UnpicklingError(f"a key is a {type(value).__name__}, not a text")
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class PlainType:
    """Replaces numpy.dtype, which a crafted state can make interpret memory as objects."""

    def __init__(self, name: Any, *flags: Any):
        self.name = _text(name)
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", self.name):
            raise pickle.UnpicklingError(f"arrays of {self.name!r} are not plain numbers")

    def __setstate__(self, state: Any) -> None:
        self.name = re.sub(r"[^<>]", "", _text(state[1])) + self.name

    def values(self, content: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
        kind, sizes = np.dtype(self.name), tuple(int(size) for size in shape)
        if type(content) is not bytes or len(content) != math.prod(sizes) * kind.itemsize:
            raise pickle.UnpicklingError(f"an array of {sizes} {kind} has the wrong number of bytes")
        return np.frombuffer(content, kind).reshape(sizes, order=order)


class PlainArray:
    """Replaces numpy.ndarray; `array` is set by its state."""

    def __init__(self, *how: Any):
        self.array: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.array = PlainType.values(kind, content, shape, "F" if by_columns else "C")


class PlainNumber:
    """Replaces the constructor of numpy scalars, which become Python numbers."""

    def __new__(cls, kind: PlainType, content: Any) -> Any:
        return PlainType.values(kind, content, ()).item()


ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _codecs.encode,
    ("numpy", "dtype"): PlainType,
    ("numpy", "ndarray"): PlainArray,
    # Old and new name of the same module.
    ("numpy.core.multiarray", "_reconstruct"): PlainArray,
    ("numpy._core.multiarray", "_reconstruct"): PlainArray,
    ("numpy.core.multiarray", "scalar"): PlainNumber,
    ("numpy._core.multiarray", "scalar"): PlainNumber,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return ALLOWED[module, name]


def _check_size(content: bytes) -> None:
    """Rejects a pickle that would take much more memory or time than its size, before loading it."""
    is_tuple: list[bool] = []
    previous, shared = "", 0
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in FORBIDDEN:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}")
        if opcode.name in PUT and argument > count:
            # All slots of the memo up to that one are allocated at once.
            raise pickle.UnpicklingError(f"it stores memo entry {argument:,} after {count} operations")
        if opcode.name in PUT or opcode.name == "MEMOIZE":
            slot = len(is_tuple) if opcode.name == "MEMOIZE" else argument
            is_tuple += [False] * (slot + 1 - len(is_tuple))
            is_tuple[slot] = "TUPLE" in previous
        shared += opcode.name in GET and is_tuple[argument : argument + 1] == [True]
        if shared > MAX_SHARED:
            raise pickle.UnpicklingError(f"it refers to tuples more than {MAX_SHARED} times")
        previous = opcode.name


def load_table(content: bytes) -> dict[str, Any]:
    """Reads a pickled dictionary of arrays, texts, numbers and containers of them, with text keys."""
    try:
        _check_size(content)
        table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if type(table) is not dict:
            raise TypeError(f"it is a {type(table).__name__}")
        return {_text(key): value.array if isinstance(value, PlainArray) else value for key, value in table.items()}
    except Exception as error:
        # Invalid pickles raise any kind of error.
        problem = str(error) or type(error).__name__
        raise ValueError(f"expected a pickled dictionary of arrays and plain values, but {problem}") from error
