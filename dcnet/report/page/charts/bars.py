"""Bars that lie, so that their names can be read on a phone."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcnet.report.page.charts.frame import WIDTH, Words, canvas, color, figure, legend
from dcnet.report.page.charts.scales import Scale, spelled
from dcnet.report.page.markup import Html, join, tag

THICK, BETWEEN, HEAD, FOOT = 13, 10, 17, 40
VALUE_ROOM = 44


@dataclass(frozen=True)
class Bars:
    """A group of bars: its name, and the value of each series that has one."""

    name: str
    values: dict[str, float]


def bar_chart(words: Words, groups: Sequence[Bars], unit: str, base: float | None = None, below: str = "") -> Html:
    """Groups from the top down; `base` is a value that all are compared with."""
    names = list(dict.fromkeys(name for group in groups for name in group.values))
    most = max(value for group in groups for value in group.values.values())
    scale = Scale(0, max(most, base or 0) * 1.02, 8, WIDTH - VALUE_ROOM)
    drawn, top = [], 4.0
    for group in groups:
        drawn.append(_group(group, names, scale, top))
        top += HEAD + THICK * len(group.values) + BETWEEN
    axis = _axis(scale, top, unit, base)
    chart = canvas(words, axis, *drawn, height=top + FOOT)
    return figure(words, chart, legend(words, names), below, class_="bars")


def _group(group: Bars, names: Sequence[str], scale: Scale, top: float) -> Html:
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


def _axis(scale: Scale, bottom: float, unit: str, base: float | None) -> Html:
    parts = []
    for value in scale.marks():
        x = f"{scale(value):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=4, y2=f"{bottom:g}"))
        parts.append(tag("text", spelled(value), x=x, y=f"{bottom + 16:g}", text_anchor="middle"))
    if base is not None:
        # By itself, since long bars leave it without a mark.
        x = f"{scale(base):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=4, y2=f"{bottom:g}", class_="base"))
    parts.append(tag("text", unit, x=WIDTH / 2, y=f"{bottom + 33:g}", text_anchor="middle"))
    return tag("g", *parts, class_="frame", aria_hidden="true")
