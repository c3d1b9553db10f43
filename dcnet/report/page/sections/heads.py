"""Heads with a margin: time and memory of a step by the number of classes."""

from typing import Any

from dcnet.report.head_plots import GIB_OF_MIB, LABELS
from dcnet.report.page.charts import Axis, Line, Words, line_chart
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.origin import made_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Record, Sources
from dcnet.report.words import where

Row = dict[str, Any]
FLOOR = "least there is, all classes"


@section("Heads of many classes", order=70)
def heads(sources: Sources) -> Html:
    """Two charts for each batch of each record."""
    found = {name: record for name, record in sources.benchmarks.items() if record["benchmark"] == "heads"}
    if not found:
        return nothing("heads", "dcnet bench heads --json results/heads_cpu.json")
    return join(_record(name, record) for name, record in found.items())


def _record(name: str, record: Record) -> Html:
    config = record["config"]
    about = f"{config['margin']}, {config['features']} features, {config['dtype']}, {where(record)}"
    charts = [chart for batch in config["batches"] for chart in _batch(f"{name}-{batch}", record, batch)]
    return join([tag("h3", about, id=f"heads-{name}"), tag("div", *charts, class_="grid"), made_by([record])])


def _batch(key: str, record: Record, batch: int) -> list[Html]:
    rows = [row for row in record["results"] if row["batch"] == batch]
    times = [(row, row["training"]["ms"]) for row in rows if "training" in row]
    sizes = [(row, row["peak_mib"] * GIB_OF_MIB) for row in rows if row.get("peak_mib")]
    least = [row for row in rows if row["head"] != "sampled"]
    floors = [(row, row["floor_ms"]) for row in least], [(row, row["floor_mib"] * GIB_OF_MIB) for row in least]
    charts = []
    for unit, what, values, floor in (("ms", "Time", times, floors[0]), ("GiB", "Peak memory", sizes, floors[1])):
        words = Words(f"heads-{key}-{unit}", f"{what} of a step, batch {batch}", "Both axes go by powers of ten.")
        charts += [_chart(words, record, values, floor, unit)] if values else []
    return charts


def _chart(
    words: Words, record: Record, values: list[tuple[Row, float]], floor: list[tuple[Row, float]], unit: str
) -> Html:
    sample = record["config"]["sample"]
    lines = [
        _line(LABELS[head].format(sample), [pair for pair in values if pair[0]["head"] == head])
        for head in record["config"]["heads"]
    ]
    lines = [line for line in [*lines, _line(FLOOR, floor)] if line.x]
    every = [value for line in lines for value in line.y]
    x = Axis("classes", *_ends([at for line in lines for at in line.x]), log=True)
    return line_chart(words, x, Axis(unit, min(every) / 1.5, max(every) * 1.5, log=True), lines, form=".4g")


def _line(name: str, pairs: list[tuple[Row, float]]) -> Line:
    points = dict(sorted((row["classes"], value) for row, value in pairs))
    return Line(name, list(points), list(points.values()), dots=True)


def _ends(values: list[float]) -> tuple[float, float]:
    """With some room, of which one number of classes alone has need, too."""
    return min(values) / 1.3, max(values) * 1.3
