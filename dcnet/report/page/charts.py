"""Draws charts as SVG, with a frame, a legend, and a title for screen readers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.report.chart import Axis, BarChart, BarGroup, Chart, Cloud, Line, LineChart, PointChart
from dcnet.report.page.markup import Html, data, join, tag

TICKS = 6
# In pixels, for a phone; on a wider page, the chart and its text are scaled up.
WIDTH, HEIGHT = 420, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 46
COLORS = 10
DOT_RADIUS = 3
# Bar charts: the height of a bar, the space around a group, and the space below all groups.
THICK, BETWEEN, HEAD, FOOT = 13, 10, 17, 40
VALUE_WIDTH = 44
# The margin around the points of a point chart.
MARGIN = 14


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

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

    def ticks(self) -> list[float]:
        """Returns the positions of ticks: round values, or powers of ten on a log scale."""
        if self.log:
            return [10.0**i for i in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]
        step = _round_up((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_up(step: float) -> float:
    """Rounds up to the next of 1, 2, 5, 10, 20, ..., times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def spelled(value: float) -> str:
    """Formats a tick label, as short as possible."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if abs(value) < 1e-3 else f"{round(value, 6):g}"


def scales(x: Axis, y: Axis) -> tuple[Scale, Scale]:
    """Returns the scales from the values of both axes to pixels within the frame."""
    across = Scale(x.low, x.high, LEFT, WIDTH - RIGHT, x.log)
    return across, Scale(y.low, y.high, HEIGHT - BOTTOM, TOP, y.log)


def frame(x: Axis, y: Axis) -> Html:
    """Draws the grid, the ticks and the names of the axes."""
    across, up = scales(x, y)
    parts = [_tick_x(across(at), text) for at, text in x.ticks or _ticks(across)]
    parts += [_tick_y(up(at), text) for at, text in y.ticks or _ticks(up)]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(tag("text", x.name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(tag("text", y.name, transform=f"translate(14 {middle}) rotate(-90)", text_anchor="middle"))
    return tag("g", *parts, class_="frame", aria_hidden="true")


def _ticks(scale: Scale) -> list[tuple[float, str]]:
    return [(value, spelled(value)) for value in scale.ticks()]


def _tick_x(place: float, text: str) -> Html:
    line = tag("line", x1=_short(place), x2=_short(place), y1=TOP, y2=HEIGHT - BOTTOM)
    return join([line, tag("text", text, x=_short(place), y=HEIGHT - BOTTOM + 17, text_anchor="middle")])


def _tick_y(place: float, text: str) -> Html:
    line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_short(place), y2=_short(place))
    return join([line, tag("text", text, x=LEFT - 6, y=_short(place + 4.5), text_anchor="end")])


def _short(place: float) -> str:
    return f"{place:.1f}"


def canvas(key: str, chart: Chart, *children: str, height: float = HEIGHT, **attributes: Any) -> Html:
    """Returns the SVG element of a chart; `key` must be unique on the page."""
    title = tag("title", f"{chart.title}. {chart.about}".strip(), id=f"{key}-title")
    box = f"0 0 {WIDTH} {height:g}"
    about = {"role": "img", "aria_labelledby": f"{key}-title", "id": f"{key}-chart"}
    return tag("svg", title, *children, viewBox=box, class_="chart", **about, **attributes)


def _clip(key: str) -> Html:
    """Returns a clip path at the frame, with room for a dot on its edge."""
    width, height = WIDTH - LEFT - RIGHT + 2 * DOT_RADIUS, HEIGHT - TOP - BOTTOM + 2 * DOT_RADIUS
    inside = tag("rect", x=LEFT - DOT_RADIUS, y=TOP - DOT_RADIUS, width=width, height=height)
    return tag("clipPath", inside, id=f"{key}-clip")


def color(i: int, dashed: bool = False) -> str:
    """Returns the CSS classes of the i-th series: a color, and dashes if requested or if the colors repeat."""
    return f"s{i % COLORS}" + (f" d{i // COLORS % 3}" if dashed or i >= COLORS else "")


def legend(key: str, title: str, names: Sequence[str], shown: int | None = None, dashed: Collection[int] = ()) -> Html:
    """Returns a list of buttons that hide or show a series each; only the first `shown` are visible at first."""
    buttons = []
    for i, name in enumerate(names):
        pressed = "true" if shown is None or i < shown else "false"
        line = tag("line", x1=0, x2=22, y1=5, y2=5)
        swatch = tag("svg", line, viewBox="0 0 22 10", class_=f"swatch {color(i, i in dashed)}", aria_hidden="true")
        about = {"aria_pressed": pressed, "aria_controls": f"{key}-chart", "data_series": str(i)}
        buttons.append(tag("li", tag("button", swatch, name, type="button", **about)))
    return tag("ul", *buttons, class_="legend", aria_label=f"Series of: {title}")


def figure(key: str, chart: Chart, *children: str, **attributes: str) -> Html:
    """Returns a figure element with the title of the chart as its caption."""
    caption = tag("figcaption", tag("strong", chart.title), f" {chart.about}" if chart.about else "")
    return tag("figure", caption, *children, id=key, **attributes)


def bar_chart(key: str, chart: BarChart) -> Html:
    """Draws horizontal bars, with groups from top to bottom."""
    most = max(value for group in chart.groups for value in group.values.values())
    scale = Scale(0, max(most, chart.base or 0) * 1.02, 8, WIDTH - VALUE_WIDTH)
    drawn, top = [], 4.0
    for group in chart.groups:
        drawn.append(_bar_group(group, chart.series, scale, top))
        top += HEAD + THICK * len(group.values) + BETWEEN
    axis = _bar_axis(scale, top, chart)
    svg = canvas(key, chart, axis, *drawn, height=top + FOOT)
    return figure(key, chart, svg, legend(key, chart.title, chart.series), class_="bars")


def _bar_group(group: BarGroup, names: Sequence[str], scale: Scale, top: float) -> Html:
    parts, place = [tag("text", group.name, x=8, y=f"{top + 13:g}", class_="group")], top + HEAD
    for name, value in group.values.items():
        parts.append(_bar(names.index(name), f"{group.name}, {name}: {value:.3g}", value, scale, place))
        place += THICK
    return join(parts)


def _bar(i: int, about: str, value: float, scale: Scale, top: float) -> Html:
    width = scale(value) - scale(0)
    bar = tag("rect", x=scale(0), y=f"{top + 1:g}", width=f"{width:.1f}", height=THICK - 2)
    text = tag("text", f"{value:.2f}", x=f"{scale(value) + 4:.1f}", y=f"{top + 10.5:g}", class_="value")
    return tag("g", tag("title", about), bar, text, class_=f"series filled {color(i)}", data_series=str(i))


def _bar_axis(scale: Scale, bottom: float, chart: BarChart) -> Html:
    parts = []
    for value in scale.ticks():
        x = f"{scale(value):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=4, y2=f"{bottom:g}"))
        parts.append(tag("text", spelled(value), x=x, y=f"{bottom + 16:g}", text_anchor="middle"))
    if chart.base is not None:
        x = f"{scale(chart.base):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=4, y2=f"{bottom:g}", class_="base"))
    parts.append(tag("text", chart.unit, x=WIDTH / 2, y=f"{bottom + 33:g}", text_anchor="middle"))
    return tag("g", *parts, class_="frame", aria_hidden="true")


def line_chart(key: str, chart: LineChart, below: str = "", shown: int | None = None, form: str = ".2f") -> Html:
    """Draws lines, with a legend and a slider that shows the values at a position.

    Args:
        key: the id of the figure, unique on the page.
        chart: the chart to draw.
        below: markup below the chart.
        shown: the number of lines that are visible at first; None for all.
        form: the number format of the values.
    """
    lines = [_line(i, line, chart, hidden=shown is not None and i >= shown) for i, line in enumerate(chart.lines)]
    cursor = tag("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden")
    svg = framed(key, chart, lines, cursor)
    values = [
        {"name": line.name, "x": list(line.x), "y": [f"{value:{form}}" for value in line.y]} for line in chart.lines
    ]
    x = {"name": chart.x.name, "low": chart.x.low, "high": chart.x.high, "log": chart.x.log}
    about = data({"x": x, "lines": values}, class_="values")
    buttons = legend(key, chart.title, [line.name for line in chart.lines], shown)
    return figure(key, chart, svg, buttons, _reader(key, chart), about, below, class_="lines")


def framed(key: str, chart: LineChart, lines: Sequence[Html], *more: str, **attributes: Any) -> Html:
    """Draws the frame, with the lines clipped to it."""
    inside = tag("g", *lines, clip_path=f"url(#{key}-clip)")
    return canvas(key, chart, _clip(key), frame(chart.x, chart.y), inside, *more, **attributes)


def _line(i: int, line: Line, chart: LineChart, hidden: bool) -> Html:
    across, up = scales(chart.x, chart.y)
    parts = [tag("title", line.name), tag("path", d=path_of(line, across, up))]
    places = [(across(a), up(b)) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
    # A path of one point is invisible.
    if line.dots or len(places) == 1:
        parts += [tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=DOT_RADIUS) for a, b in places]
    # Use an attribute of SVG, which works without a style sheet.
    visibility = "hidden" if hidden else None
    return tag("g", *parts, class_=f"series {color(i)}", data_series=str(i), visibility=visibility)


def path_of(line: Line, across: Scale, up: Scale) -> str:
    """Returns the attribute `d` of an SVG path."""
    points = [f"{across(a):.1f} {up(b):.1f}" for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
    return "M" + "L".join(points) if points else ""


def _reader(key: str, chart: LineChart) -> Html:
    """Returns a slider over all x values of the lines."""
    count = len({at for line in chart.lines for at in line.x})
    if count < 2:
        return Html("")
    name, most = f"{key}-at", count - 1
    slider = tag("input", type="range", id=name, min=0, max=most, value=most, step=1, data_reader=True)
    label = tag("label", f"Show values at: {chart.x.name}", for_=name)
    # The script needs the pixels of the frame to place the cursor.
    places = {"data_left": LEFT, "data_right": WIDTH - RIGHT}
    return tag("div", label, slider, tag("output", for_=name, aria_live="polite"), class_="reader", **places)


def point_chart(key: str, chart: PointChart, below: str = "") -> Html:
    """Draws points and directions, with the same scale on both axes."""
    across = Scale(-chart.reach, chart.reach, MARGIN, WIDTH - MARGIN)
    up = Scale(-chart.reach, chart.reach, WIDTH - MARGIN, MARGIN)
    middle = WIDTH / 2
    cross = join(
        [
            tag("line", x1=MARGIN, x2=WIDTH - MARGIN, y1=middle, y2=middle),
            tag("line", y1=MARGIN, y2=WIDTH - MARGIN, x1=middle, x2=middle),
        ]
    )
    drawn = [_cloud(i, cloud, across, up, chart.reach) for i, cloud in enumerate(chart.clouds)]
    svg = canvas(key, chart, tag("g", cross, class_="frame"), *drawn, height=WIDTH)
    return figure(
        key, chart, svg, legend(key, chart.title, [cloud.name for cloud in chart.clouds]), below, class_="points"
    )


def _cloud(i: int, cloud: Cloud, across: Scale, up: Scale, reach: float) -> Html:
    inside = [(x, y) for x, y in cloud.points if max(abs(x), abs(y)) <= reach]
    # Draw dots as lines of length zero with round ends, which take a third of the characters of circles.
    dots = "".join(f"M{across(x):.1f} {up(y):.1f}h0" for x, y in inside)
    parts = [tag("title", cloud.name), tag("path", d=dots, class_="dots")]
    if cloud.direction is not None:
        x, y = f"{across(cloud.direction[0]):.1f}", f"{up(cloud.direction[1]):.1f}"
        parts.append(tag("line", x1=WIDTH / 2, y1=WIDTH / 2, x2=x, y2=y, class_="direction"))
        parts.append(tag("text", cloud.name, x=x, y=y, text_anchor="middle", class_="name"))
    return tag("g", *parts, class_=f"series {color(i)}", data_series=str(i))
