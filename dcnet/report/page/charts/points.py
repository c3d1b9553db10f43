"""Points of the plane in the colours of their classes, with a line for each class's direction."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcnet.report.page.charts.frame import WIDTH, Words, canvas, color, figure, legend
from dcnet.report.page.charts.scales import Scale
from dcnet.report.page.markup import Html, join, tag

MARGIN = 14
Point = tuple[float, float]


@dataclass(frozen=True)
class Cloud:
    """The points of one class, and where its direction ends."""

    name: str
    points: Sequence[Point]
    direction: Point | None = None


def point_chart(words: Words, clouds: Sequence[Cloud], reach: float, below: str = "") -> Html:
    """Points up to `reach` from the middle, on axes of one scale."""
    across = Scale(-reach, reach, MARGIN, WIDTH - MARGIN)
    up = Scale(-reach, reach, WIDTH - MARGIN, MARGIN)
    middle = WIDTH / 2
    cross = join(
        [
            tag("line", x1=MARGIN, x2=WIDTH - MARGIN, y1=middle, y2=middle),
            tag("line", y1=MARGIN, y2=WIDTH - MARGIN, x1=middle, x2=middle),
        ]
    )
    drawn = [_cloud(i, cloud, across, up, reach) for i, cloud in enumerate(clouds)]
    chart = canvas(words, tag("g", cross, class_="frame"), *drawn, height=WIDTH)
    return figure(words, chart, legend(words, [cloud.name for cloud in clouds]), below, class_="points")


def _cloud(i: int, cloud: Cloud, across: Scale, up: Scale, reach: float) -> Html:
    inside = [(x, y) for x, y in cloud.points if max(abs(x), abs(y)) <= reach]
    # A line of no length with round ends is a dot, in a third of the letters that a circle takes.
    dots = "".join(f"M{across(x):.1f} {up(y):.1f}h0" for x, y in inside)
    parts = [tag("title", cloud.name), tag("path", d=dots, class_="dots")]
    if cloud.direction is not None:
        x, y = f"{across(cloud.direction[0]):.1f}", f"{up(cloud.direction[1]):.1f}"
        parts.append(tag("line", x1=WIDTH / 2, y1=WIDTH / 2, x2=x, y2=y, class_="direction"))
        parts.append(tag("text", cloud.name, x=x, y=y, text_anchor="middle", class_="name"))
    return tag("g", *parts, class_=f"series {color(i)}", data_series=str(i))
