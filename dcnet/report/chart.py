"""Charts as data: the report page draws them as SVG, `dcnet.report.drawing` with matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        low, high: limits on the report page; matplotlib chooses its own.
        log: whether the axis is logarithmic.
        ticks: positions of ticks and their labels; empty to choose them automatically.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of a chart, with points from left to right; `style` is passed to matplotlib."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LineChart:
    """A chart of lines; `about` is shown next to the title on the report page."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    about: str = ""


@dataclass(frozen=True)
class BarGroup:
    """A group of bars, with values by series; some series may be missing."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class BarChart:
    """A chart of grouped bars; a line marks the value `base`."""

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
    """The points of a class, and the end of the line that shows the direction of its weights."""

    name: str
    points: Sequence[Point]
    direction: Point | None = None


@dataclass(frozen=True)
class PointChart:
    """A scatter plot of classes; axes extend to `reach` from the origin."""

    title: str
    clouds: Sequence[Cloud]
    reach: float
    about: str = ""


Chart = LineChart | BarChart | PointChart
