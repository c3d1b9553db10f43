"""Test error by step, plain and decoupled networks side by side: Figure 4, and the same of all other runs."""

import math
from collections.abc import Sequence
from typing import Any

from dcnet.operator import is_plain
from dcnet.report.curve_labels import labels
from dcnet.report.page.charts import Axis, Line, Words, line_chart
from dcnet.report.page.markup import Html, join, paragraph, tag
from dcnet.report.page.origin import made_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources
from dcnet.training.summary import grouped

Record = dict[str, Any]
FIGURE_4 = ("cifar100", "resnet32")
COMMAND = "dcnet train --recipe paper-cifar --operators conv tanh-cos seg-cos"
# More lines than that hide each other: the others wait for their button.
SHOWN = 8
# Until then nearly all is wrong, which would flatten the rest.
LATE = 0.08


@section("Training curves", order=20)
def curves(sources: Sources) -> Html:
    """Figure 4 first, and then a chart for each dataset and network that some run was trained on."""
    charts: dict[tuple[str, str], list[Record]] = {FIGURE_4: []}
    for record in sources.curves:
        charts.setdefault((record["config"]["dataset"], record["config"]["model"]), []).append(record)
    drawn = [tag("div", _chart(*place, records)) for place, records in charts.items()]
    return tag("div", *drawn, class_="grid")


def _chart(dataset: str, model: str, records: Sequence[Record]) -> Html:
    figure4 = (dataset, model) == FIGURE_4
    heading = tag("h3", "Figure 4: " * figure4 + f"{model} on {dataset}", id=f"curves-{_key(dataset, model)}")
    if not records:
        return join([heading, nothing("these runs", COMMAND)])
    groups = sorted(grouped(records).values(), key=lambda members: not is_plain(members[0]["config"]["operator"]))
    lines = [line for name, members in zip(labels(groups), groups, strict=True) if (line := _line(name, members)).x]
    if not lines:
        return join([heading, paragraph("No evaluation of these runs came to a finite number.")])
    words = Words(f"chart-{_key(dataset, model)}", "Test error in % by step", _about(groups))
    steps = Axis("step", 0, max(max(line.x) for line in lines))
    shown = SHOWN if len(lines) > SHOWN else None
    return join([heading, line_chart(words, steps, _errors(lines), lines, made_by(records), shown)])


def _line(name: str, members: Sequence[Record]) -> Line:
    """The mean over those seeds that got so far."""
    found: dict[int, list[float]] = {}
    for record in members:
        for step, accuracy in zip(record["curves"]["step"], record["curves"]["test_accuracy"], strict=True):
            found.setdefault(step, []).extend([] if accuracy is None else [100 - accuracy])
    points = sorted((step, values) for step, values in found.items() if values)
    return Line(name, [step for step, _ in points], [sum(values) / len(values) for _, values in points])


def _errors(lines: Sequence[Line]) -> Axis:
    whole = [value for line in lines for value in line.y]
    late = [value for line in lines for at, value in zip(line.x, line.y, strict=True) if at >= LATE * max(line.x)]
    step = 5 if max(late) - min(whole) > 15 else 1
    low, high = math.floor(min(whole) / step) * step, math.ceil(max(late) / step) * step
    return Axis("test error, %", max(0, low), min(100, high) if high > low else low + step)


def _about(groups: Sequence[Sequence[Record]]) -> str:
    several = max(map(len, groups)) > 1
    return "The mean over seeds." if several else "One seed each."


def _key(dataset: str, model: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{dataset}-{model}")
