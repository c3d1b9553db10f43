"""Charts as data: the report page draws them as SVG, `dcnet.report.drawing` with matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Axis:
    """The name of an axis, its limits, whether it is logarithmic, and ticks with their labels.

    Matplotlib chooses the limits itself; only the page uses these.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Line:
    """The points of a series, from left to right; `style` is passed to matplotlib."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LineChart:
    """Lines over one pair of axes."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    about: str = ""


@dataclass(frozen=True)
class BarGroup:
    """A group of bars: its name, and the values by series; a series may lack one."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class BarChart:
    """Groups of bars; a line marks the value `base`."""

    title: str
    unit: str
    groups: Sequence[BarGroup]
    base: float | None = None
    about: str = ""

    @property
    def series(self) -> list[str]:
        """The names of the series, in the order in which they appear."""
        return list(dict.fromkeys(name for group in self.groups for name in group.values))


Point = tuple[float, float]


@dataclass(frozen=True)
class Cloud:
    """The points of a class, and the end of its direction."""

    name: str
    points: Sequence[Point]
    direction: Point | None = None


@dataclass(frozen=True)
class PointChart:
    """Clouds of points up to `reach` from the origin."""

    title: str
    clouds: Sequence[Cloud]
    reach: float
    about: str = ""


Chart = LineChart | BarChart | PointChart
