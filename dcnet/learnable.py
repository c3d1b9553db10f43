"""Numbers that a layer learns for itself."""

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

# A learned number that must stay positive is stored as r, with value r^2 + FLOOR; the constant is the authors'.
FLOOR = 1e-4


def check_number(what: str, value: Any, above: float | None = None) -> None:
    """Refuses what is not a finite number, or not above the given limit."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, not {value!r}")
    if not _is_finite(value):
        # Hundreds of digits are nothing to read.
        found = f"an integer of {len(str(value))} digits" if isinstance(value, int) else repr(value)
        raise ValueError(f"{what} must be finite, not {found}")
    if above is not None and value <= above:
        limit = "positive" if above == 0 else f"above {above:g}"
        raise ValueError(f"{what} must be {limit}, not {value!r}")


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold, which integers of more than 308 digits are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_flag(what: str, value: Any) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}")


def take_plain_numbers(described: Any) -> None:
    """Makes numpy's numbers in the fields of a frozen dataclass Python's own, so that they print as specs."""
    for declared in dataclasses.fields(described):
        value: Any = getattr(described, declared.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            plain = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(described, declared.name, plain)


@dataclass(frozen=True)
class Learnable:
    """A constant of a magnitude or an angle that each layer learns, starting from `init`.

    One number a layer, or one per output channel. Where the constant must be positive it is stored as r, with value
    r^2 + floor.
    """

    init: float = 1.0
    per_channel: bool = False
    floor: float = FLOOR

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_flag("per_channel of a learned constant", self.per_channel)
        check_number("init", self.init)
        check_number("floor", self.floor, above=0)


Constant = float | Learnable
