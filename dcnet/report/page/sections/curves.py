"""Test error by step, plain and decoupled networks side by side: Figure 4, and the same of all other runs."""

import math
from collections.abc import Sequence
from typing import Any

from dcnet.data.cifar_validation import NAME as HELD_BACK
from dcnet.report.page.charts import Axis, Line, Words, line_chart
from dcnet.report.page.curve_groups import FIGURE_4, SHOWN, CurveGroup, curve_groups
from dcnet.report.page.markup import Html, join, paragraph, tag
from dcnet.report.page.origin import made_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

Record = dict[str, Any]
COMMAND = f"dcnet reproduce {FIGURE_4}"
# Until then nearly all is wrong, which would flatten the rest.
LATE = 0.08


@section("Training curves", order=20)
def curves(sources: Sources) -> Html:
    """Figure 4, and then a chart for each table, and for each dataset and network of the other runs."""
    return tag("div", *(tag("div", _chart(group)) for group in curve_groups(sources)), class_="grid")


def _chart(group: CurveGroup) -> Html:
    heading = tag("h3", group.title, id=f"curves-{group.key}")
    if not group.lines:
        return join([heading, nothing("these runs", COMMAND)])
    lines = [line for name, members in group.lines if (line := _line(name, members)).x]
    if not lines:
        return join([heading, paragraph("No evaluation of these runs came to a finite number.")])
    words = Words(f"chart-{group.key}", f"{_errors_of(group).capitalize()} in % by step", _about(group))
    steps = Axis("step", 0, max(max(line.x) for line in lines))
    # The others wait for their button.
    shown = SHOWN if len(lines) > SHOWN else None
    errors = _errors(f"{_errors_of(group)}, %", lines)
    return join([heading, line_chart(words, steps, errors, lines, made_by(group.records), shown)])


def _errors_of(group: CurveGroup) -> str:
    """What they are called: a recipe that is only tried is kept from the test set."""
    held_back = all(record["config"].get("dataset") == HELD_BACK for record in group.records)
    return "error on images held back" if held_back else "test error"


def _line(name: str, members: Sequence[Record]) -> Line:
    """The mean over those seeds that got so far."""
    found: dict[int, list[float]] = {}
    for record in members:
        for step, accuracy in zip(record["curves"]["step"], record["curves"]["test_accuracy"], strict=True):
            found.setdefault(step, []).extend([] if accuracy is None else [100 - accuracy])
    points = sorted((step, values) for step, values in found.items() if values)
    return Line(name, [step for step, _ in points], [sum(values) / len(values) for _, values in points])


def _errors(name: str, lines: Sequence[Line]) -> Axis:
    whole = [value for line in lines for value in line.y]
    late = [value for line in lines for at, value in zip(line.x, line.y, strict=True) if at >= LATE * max(line.x)]
    step = 5 if max(late) - min(whole) > 15 else 1
    low = min(math.floor(min(whole) / step) * step, 100 - step)
    return Axis(name, max(0, low), min(100, max(math.ceil(max(late) / step) * step, low + step)))


def _about(group: CurveGroup) -> str:
    several = max(len(members) for _, members in group.lines) > 1
    return "The mean over seeds." if several else "One seed each."
