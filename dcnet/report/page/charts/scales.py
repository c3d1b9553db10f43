"""From values to places, linearly or by powers of ten, and the values worth a mark."""

import math
from dataclasses import dataclass

MARKS = 6


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` at places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._inner(self.low), self._inner(self.high)
        return self.start + (self._inner(value) - low) / (high - low) * (self.end - self.start)

    def _inner(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def marks(self) -> list[float]:
        """Round values, or powers of ten."""
        if self.log:
            return [10.0**i for i in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]
        step = _round_up((self.high - self.low) / MARKS)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_up(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def spelled(value: float) -> str:
    """A mark in as few letters as it takes."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if abs(value) < 1e-3 else f"{round(value, 6):g}"
