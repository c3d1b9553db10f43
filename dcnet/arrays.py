"""Tensors of whatever holds numbers: tensors, NumPy arrays, and lists."""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# What functions for measurements take: a tensor, a NumPy array, or numbers in lists.
Numbers: TypeAlias = Any


def as_tensor(given: Numbers, name: str) -> Tensor:
    """The tensor itself, or one of the same numbers; those of a list are float64, int64 or bool.

    Args:
        given: a tensor, an array of any layout, read-only or not, or nested lists of numbers.
        name: what it is, for the error.
    """
    if isinstance(given, Tensor):
        return given
    if isinstance(given, list | tuple) and given and all(isinstance(each, Tensor) for each in given):
        return torch.stack(tuple(given))
    return torch.from_numpy(_readable(_array(given, name)))


def _array(given: Numbers, name: str) -> "np.ndarray[Any, Any]":
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a tensor, an array or lists of equal length, not {_short(given)}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be numbers, not {_short(given)} of dtype {array.dtype}")
    return array


def _readable(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """As torch can read it, in its own byte order and of a type that it has; and row by row, for the same rounding."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size > 1:
        return array.astype(np.int64)
    if kind == "f" and size > 8:
        return array.astype(np.float64)
    readable = array.dtype.isnative and array.flags.writeable and array.flags.c_contiguous
    return array if readable else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)


def _short(given: Numbers) -> str:
    shown = repr(given) if isinstance(given, str | int | float | None) else type(given).__name__
    return shown if len(shown) <= 40 else shown[:40] + "..."
