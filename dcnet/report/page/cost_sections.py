"""Sections about the cost of decoupling: times relative to plain PyTorch, and costs of heads by number of classes."""

import dataclasses

from dcnet.report.chart import LineChart
from dcnet.report.page.assembly import section
from dcnet.report.page.charts import bar_chart, line_chart
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.page_sources import Sources, Values
from dcnet.report.page.provenance import commands_of, no_records
from dcnet.report.speed_plots import BARS, head_charts, head_title, speed_charts, speed_title


@section("Speed", order=60)
def speed(sources: Sources) -> Html:
    """Draws the charts of all benchmarks of layers and networks."""
    found = {name: record for name, record in sources.benchmarks.items() if record["benchmark"] in BARS}
    if not found:
        return no_records("benchmarks", "dcnet bench layers --json results/layers_cpu.json")
    return join(_benchmark(name, record) for name, record in found.items())


def _benchmark(name: str, record: Values) -> Html:
    charts = [bar_chart(f"speed-{name}-{i}", chart) for i, chart in enumerate(speed_charts(record))]
    heading = tag("h3", speed_title(record), id=f"speed-{name}")
    return join([heading, tag("div", *charts, class_="grid"), commands_of([record])])


@section("Heads with many classes", order=70)
def heads(sources: Sources) -> Html:
    """Draws time and memory for each batch size of each record."""
    found = {name: record for name, record in sources.benchmarks.items() if record["benchmark"] == "heads"}
    if not found:
        return no_records("heads", "dcnet bench heads --json results/heads_cpu.json")
    return join(_heads(name, record) for name, record in found.items())


def _heads(name: str, record: Values) -> Html:
    charts = [
        line_chart(f"heads-{name}-{batch}-{unit}", _with_limits(chart), form=".4g")
        for batch in record["config"]["batches"]
        for unit, chart in zip(("ms", "GiB"), head_charts(record, batch), strict=True)
        if len(chart.lines) > 1
    ]
    heading = tag("h3", head_title(record), id=f"heads-{name}")
    return join([heading, tag("div", *charts, class_="grid"), commands_of([record])])


def _with_limits(chart: LineChart) -> LineChart:
    """Sets the limits of the axes around all points, even if there is only one number of classes."""
    x = [at for line in chart.lines for at in line.x]
    y = [value for line in chart.lines for value in line.y]
    return dataclasses.replace(
        chart,
        x=dataclasses.replace(chart.x, low=min(x) / 1.3, high=max(x) * 1.3),
        y=dataclasses.replace(chart.y, low=min(y) / 1.5, high=max(y) * 1.5),
    )
