"""Features of two or three dimensions as they lie: Figures 1 and 6."""

import math
from typing import Any

from dcnet.report.feature_checks import check_features
from dcnet.report.page.charts import Cloud, Words, point_chart
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.origin import nothing, number
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

Record = dict[str, Any]
COMMANDS = ("dcnet train --recipe features --margin a-softmax", "dcnet plot features mnist --records results/features")
# Of the distances from the middle, so that a few images far out do not make all others small.
REACH = 0.99
# Three features lie on the sphere, which is looked at from there: to the side, and from above.
TURN, TILT = 0.6, 0.4
ANGLES = {"within": "within a class", "between": "between classes", "nearest": "to the nearest class"}


@section("Features", order=40)
def features(sources: Sources) -> Html:
    """A picture for each record."""
    if not sources.features:
        return nothing("features", *COMMANDS)
    return tag("div", *(_picture(name, record) for name, record in sources.features.items()), class_="grid")


def _picture(name: str, record: Record) -> Html:
    try:
        check_features(record)
    except ValueError as error:
        raise ValueError(f"the features of the record {name!r} cannot be drawn: {error}") from None
    points = [_flat(point) for point in record["points"]]
    distances = sorted(math.hypot(*point) for point in points)
    reach = 1.2 * (distances[math.ceil(REACH * len(distances)) - 1] or 1.0)
    clouds = []
    for c, title in enumerate(record["classes"]):
        own = [point for point, label in zip(points, record["labels"], strict=True) if label == c]
        clouds.append(Cloud(str(title), own, _direction(record, c, reach / 1.2)))
    words = Words(f"features-{name}", record["title"], "Test images in the colours of their classes.")
    return point_chart(words, clouds, reach, _numbers(record))


def _flat(point: list[float]) -> tuple[float, float]:
    """A point of the plane as it is, and one of space as the sphere shows its direction."""
    if len(point) == 2:
        return point[0], point[1]
    length = math.hypot(*point) or 1.0
    x, y, z = (part / length for part in point)
    side, depth = x * math.cos(TURN) + y * math.sin(TURN), y * math.cos(TURN) - x * math.sin(TURN)
    return side, z * math.cos(TILT) - depth * math.sin(TILT)


def _direction(record: Record, c: int, reach: float) -> tuple[float, float] | None:
    if record["directions"] is None:
        return None
    direction = record["directions"][c]
    length = math.hypot(*direction) or 1.0
    x, y = _flat([part / length for part in direction])
    return (x, y) if len(direction) == 3 else (x * reach, y * reach)


def _numbers(record: Record) -> Html:
    """How well it does, and how its features lie."""
    spread = record["spread"]
    rows = [("test accuracy, %", record["accuracy"], ".2f")]
    rows += [(f"mean angle {words}, °", spread[key], ".1f") for key, words in ANGLES.items()]
    rows.append(("angular Fisher score", spread["fisher"], ".4f"))
    known = [(words, number(f"{value:{form}}", [record])) for words, value, form in rows if value is not None]
    return tag("dl", *(join([tag("dt", words), tag("dd", shown)]) for words, shown in known), class_="numbers")
