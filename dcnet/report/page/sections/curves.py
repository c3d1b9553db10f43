"""Test error by step, plain and decoupled networks side by side: Figure 4, and the same of all other runs."""

import math
from collections.abc import Mapping, Sequence
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
FIGURE_4, COMMAND = "table4", "dcnet reproduce table4"
# More lines than that hide each other: the others wait for their button.
SHOWN = 8
# Until then nearly all is wrong, which would flatten the rest.
LATE = 0.08


@section("Training curves", order=20)
def curves(sources: Sources) -> Html:
    """Figure 4, which has the runs of Table 4, and then a chart for each dataset and network of the other runs."""
    found = {experiment.name: cells for experiment, cells in sources.experiments}[FIGURE_4]
    first = [record for cell in found for record in cell.records if record["curves"].get("step")]
    names, others = {_name(record) for record in first}, dict[tuple[str, str], list[Record]]()
    for record in sources.curves:
        if _name(record) not in names:
            others.setdefault((record["config"]["model"], record["config"]["dataset"]), []).append(record)
    title = "Figure 4: ResNet-32 on CIFAR-100, plain and decoupled"
    drawn = [_chart("figure4", title, first)]
    drawn += [_chart(_key(*place), " on ".join(place), records) for place, records in others.items()]
    return tag("div", *(tag("div", one) for one in drawn), class_="grid")


def _chart(key: str, title: str, records: Sequence[Record]) -> Html:
    heading = tag("h3", title, id=f"curves-{key}")
    if not records:
        return join([heading, nothing("these runs", COMMAND)])
    groups = sorted(grouped(records).values(), key=_place)
    lines = [line for name, members in zip(labels(groups), groups, strict=True) if (line := _line(name, members)).x]
    if not lines:
        return join([heading, paragraph("No evaluation of these runs came to a finite number.")])
    words = Words(f"chart-{key}", "Test error in % by step", _about(groups))
    steps = Axis("step", 0, max(max(line.x) for line in lines))
    shown = SHOWN if len(lines) > SHOWN else None
    return join([heading, line_chart(words, steps, _errors(lines), lines, made_by(records), shown)])


def _place(members: Sequence[Record]) -> tuple[bool, bool]:
    """Plain networks first, and then those that differ in the magnitude alone."""
    operator = members[0]["config"]["operator"]
    return not is_plain(operator), not operator.endswith("-cos")


def _name(record: Mapping[str, Any]) -> str:
    return f"{record['name']}-{record['hash']}"


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


def _key(model: str, dataset: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{dataset}-{model}")
