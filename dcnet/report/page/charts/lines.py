"""Lines over an axis, with a legend that hides them and a slider that reads them off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.report.page.charts.frame import (
    BOTTOM,
    DOT,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Words,
    canvas,
    clip,
    color,
    figure,
    frame,
    legend,
    scales,
)
from dcnet.report.page.charts.scales import Scale
from dcnet.report.page.markup import Html, data, join, tag


@dataclass(frozen=True)
class Line:
    """Points of one series, from left to right."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


def line_chart(
    words: Words, x: Axis, y: Axis, lines: Sequence[Line], below: str = "", shown: int | None = None, form: str = ".2f"
) -> Html:
    """The chart, its legend, a slider over all that x has, and what is to stand below; `form` is that of what is read.

    Lines from `shown` on begin hidden.
    """
    drawn = join(_group(i, line, x, y, hidden=shown is not None and i >= shown) for i, line in enumerate(lines))
    cursor = tag("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden")
    inside = tag("g", drawn, clip_path=f"url(#{words.key}-clip)")
    chart = canvas(words, clip(words), frame(x, y), inside, cursor)
    values = [{"name": line.name, "x": list(line.x), "y": [f"{value:{form}}" for value in line.y]} for line in lines]
    about = data({"x": _described(x), "lines": values}, class_="values")
    names = [line.name for line in lines]
    reading = join([chart, legend(words, names, shown), _reader(words, x, lines), about, below])
    return figure(words, reading, class_="lines")


def _group(i: int, line: Line, x: Axis, y: Axis, hidden: bool) -> Html:
    across, up = scales(x, y)
    parts = [tag("title", line.name), tag("path", d=path_of(line, across, up))]
    places = [(across(a), up(b)) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
    # Of one point there is no line to see.
    if line.dots or len(places) == 1:
        parts += [tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=DOT) for a, b in places]
    # Of SVG's own attributes, so that it holds without any style sheet.
    visibility = "hidden" if hidden else None
    return tag("g", *parts, class_=f"series {color(i)}", data_series=str(i), visibility=visibility)


def path_of(line: Line, across: Scale, up: Scale) -> str:
    """The line as SVG writes it."""
    points = [f"{across(a):.1f} {up(b):.1f}" for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
    return "M" + "L".join(points) if points else ""


def _reader(words: Words, x: Axis, lines: Sequence[Line]) -> Html:
    """A slider over the places where any line has a point; it works from the keyboard and by touch."""
    count = len({at for line in lines for at in line.x})
    if count < 2:
        return Html("")
    key, most = f"{words.key}-at", count - 1
    slider = tag("input", type="range", id=key, min=0, max=most, value=most, step=1, data_reader=True)
    label = tag("label", f"Read off at: {x.name}", for_=key)
    # Pixels of the frame, for the cursor; what is read off is said aloud when it changes.
    places = {"data_left": LEFT, "data_right": WIDTH - RIGHT}
    return tag("div", label, slider, tag("output", for_=key, aria_live="polite"), class_="reader", **places)


def _described(x: Axis) -> dict[str, Any]:
    return {"name": x.name, "low": x.low, "high": x.high, "log": x.log}
