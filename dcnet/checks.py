"""Checks of arguments: each raises an error that says what is wrong, the value, and what would be right."""

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dcnet.registry import quote, unknown_name

# A tensor, a NumPy array, or numbers in lists.
Numbers: TypeAlias = Any

# Pixels may exceed [0, 1] by this much, for example after resizing.
ROUNDING = 1e-3


def check_number(
    what: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Checks that the value is a finite number within its limits; `above` and `below` are exclusive."""
    if not is_number(value):
        raise TypeError(f"{what} must be a number, not {value!r}")
    if not _is_finite(value):
        # Do not print hundreds of digits.
        found = f"an integer of {len(str(value))} digits" if isinstance(value, int) else repr(value)
        raise ValueError(f"{what} must be finite, not {found}")
    too_small = (above is not None and value <= above) or (least is not None and value < least)
    if too_small or (below is not None and value >= below) or (most is not None and value > most):
        raise ValueError(f"{what} must {_limits(above, least, below, most)}, not {value!r}")


def is_number(value: Any) -> bool:
    """Whether the value is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether a float can hold the number; integers of more than 308 digits are too large."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _limits(above: float | None, least: float | None, below: float | None, most: float | None) -> str:
    low, high = above if least is None else least, below if most is None else most
    if low is not None and high is not None:
        return f"be in {'(' if least is None else '['}{low:g}, {high:g}{')' if most is None else ']'}"
    if low is not None and above is None:
        return "not be negative" if low == 0 else f"be {low:g} or more"
    if low is not None:
        return "be positive" if low == 0 else f"be above {low:g}"
    return f"be below {high:g}" if most is None else f"be {high:g} or less"


def check_whole(what: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Checks that the value is a whole number of Python or NumPy within its limits. Returns it as an int."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least) or (most is not None and value > most):
        limits = f" from {least} to {most}" if most is not None else "" if least is None else f", {least} or more"
        raise ValueError(f"{what} must be a whole number{limits}, not {quote(value)}")
    return int(value)


def check_flag(what: str, value: Any) -> None:
    """Checks that the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}")


def check_choice(kind: str, value: Any, known: Iterable[str]) -> None:
    """Checks that the value is one of the known names."""
    names = list(known)
    if value not in names:
        raise unknown_name(kind, value, names)


def check_tensor(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, not {type(value).__name__}: use torch.as_tensor")


def check_images(images: Tensor, what: str = "images") -> Tensor:
    """Checks images [N, ...], uint8 or float in [0, 1]. Returns them as float32 or float64 in [0, 1]."""
    check_tensor(what, images)
    if images.dim() < 2:
        raise ValueError(f"{what} must be [N, ...], not {list(images.shape)}")
    if not images.numel():
        raise ValueError(f"there are no {what}: expected [N, ...] with one image or more, not {list(images.shape)}")
    keeps = images.dtype == torch.float64
    pixels = images / 255 if images.dtype == torch.uint8 else images if keeps else images.float()
    low, high = (float(end) for end in pixels.aminmax())
    if math.isnan(low + high):
        bad = pixels.flatten(1).isnan().any(1).nonzero()[:, 0]
        raise ValueError(f"image {int(bad[0])} has a pixel that is NaN; {len(bad)} of {len(images)} images have one")
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise ValueError(
            f"{what} must be uint8, or float in [0, 1], not {images.dtype} from {low:g} to {high:g}: normalize inside "
            "the model, as dcnet.models.blocks.Normalized does"
        )
    return pixels.clamp(0, 1)


def check_labels(what: str, labels: Tensor, count: int, classes: int | None = None) -> Tensor:
    """Checks integer labels [count], and that each is one of the classes. Returns a copy in int64."""
    check_tensor(what, labels)
    if labels.shape != (count,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{what} must be integers [{count}], one per image, not {labels.dtype} {list(labels.shape)}")
    low, high = (int(labels.min()), int(labels.max())) if count else (0, 0)
    if classes is not None and count and (low < 0 or high >= classes):
        found = low if low < 0 else high
        raise ValueError(f"{what} must be from 0 to {classes - 1}, as there are {classes} classes, not {found}")
    # A copy, since a tensor of inference mode cannot take part in a gradient.
    return labels.long().clone()


def as_tensor(given: Numbers, name: str) -> Tensor:
    """Converts the argument to a tensor; numbers in lists become float64, int64 or bool.

    Args:
        given: a tensor, an array of any layout, read-only or not, or nested lists of numbers.
        name: the name of the argument, for error messages.
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
        raise TypeError(f"{name} must be a tensor, an array or lists of equal length, not {_shorten(given)}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be numbers, not {_shorten(given)} of dtype {array.dtype}")
    return array


def _readable(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The array in a dtype, byte order and layout that torch reads; C-contiguous, so that sums round alike."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size > 1:
        return array.astype(np.int64)
    if kind == "f" and size > 8:
        return array.astype(np.float64)
    readable = array.dtype.isnative and array.flags.writeable and array.flags.c_contiguous
    return array if readable else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)


def _shorten(given: Numbers) -> str:
    shown = repr(given) if isinstance(given, str | int | float | None) else type(given).__name__
    return shown if len(shown) <= 40 else shown[:40] + "..."


def shortened(value: Any) -> str:
    """The repr of a value for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
