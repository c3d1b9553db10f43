"""Accuracy by the budget of an attack, or by the severity of a corruption, from the evaluations of runs."""

from typing import Any

from dcnet.report.page.charts import Axis, Line, Words, line_chart
from dcnet.report.page.curves_in import Curve, curves_in
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.origin import made_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Record, Sources

Found = list[tuple[Record, Curve]]
# In %: where all networks have less there is nothing left to see.
LEFT = 0.5


@section("Robustness", order=50)
def robustness(sources: Sources) -> Html:
    """A chart for each attack on networks of one kind, with a line for each run."""
    charts: dict[tuple[str, str, str], Found] = {}
    for record in sources.runs:
        network = f"{record['config']['model']} on {record['config']['dataset']}"
        for curve in curves_in(record.get("evaluations") or {}):
            charts.setdefault((network, curve.name, curve.axis), []).append((record, curve))
    if not charts:
        return nothing("accuracy under attacks", "dcnet attack RUN", "dcnet reproduce table7 table8")
    drawn = [tag("div", _chart(f"robustness-{i}", *place, found)) for i, (place, found) in enumerate(charts.items())]
    return tag("div", *drawn, class_="grid")


def _chart(key: str, network: str, attack: str, axis: str, found: Found) -> Html:
    lines = [_line(record, curve) for record, curve in found]
    words = Words(f"chart-{key}", f"Accuracy in % by {axis}", "On test images that were changed.")
    x, y = Axis(axis, 0, _end(lines)), Axis("accuracy, %", 0, 100)
    chart = line_chart(words, x, y, lines, made_by(record for record, _ in found))
    return join([tag("h3", f"{network}: {attack}", id=key), chart])


def _line(record: Record, curve: Curve) -> Line:
    config: dict[str, Any] = record["config"]
    trained = f", trained with {config['adversary']}" if config.get("adversary") else ""
    name = f"{config['operator']}{trained}, seed {config['seed']}"
    return Line(name, [x for x, _ in curve.points], [100 * y for _, y in curve.points], dots=True)


def _end(lines: list[Line]) -> float:
    """As far as some network is right about some image, and one point further."""
    ends = []
    for line in lines:
        over = [x for x, y in zip(line.x, line.y, strict=True) if y <= LEFT]
        ends.append(min(over, default=max(line.x)))
    return max(ends) or 1.0
