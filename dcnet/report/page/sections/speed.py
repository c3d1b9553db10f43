"""What decoupling costs: times as multiples of torch's own layers and networks."""

import math

from dcnet.report.page.charts import Bars, Words, bar_chart
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.origin import made_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Record, Sources
from dcnet.report.speed import BARS, Bar
from dcnet.report.words import where

TITLES = {
    "layers": ("Forward and backward of one layer", "time, x nn.Conv2d"),
    "network": ("Training step of a network", "time, x the plain network"),
    "inference": ("Forward pass in evaluation", "time, x the folded plain network"),
}


@section("Speed", order=60)
def speed(sources: Sources) -> Html:
    """A chart for each panel of each benchmark."""
    found = {name: record for name, record in sources.benchmarks.items() if record["benchmark"] in TITLES}
    if not found:
        return nothing("benchmarks", "dcnet bench layers --json results/layers_cpu.json")
    return join(_benchmark(name, record) for name, record in found.items())


def _benchmark(name: str, record: Record) -> Html:
    title, unit = TITLES[record["benchmark"]]
    config = record["config"]
    network = [config["model"]] if isinstance(config.get("model"), str) else []
    about = ", ".join([title, *network, str(config.get("dtype", config.get("precision"))), where(record)])
    bars = [bar for bar in BARS[record["benchmark"]](record) if math.isfinite(bar.ratio)]
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    charts = [_panel(f"speed-{name}-{i}", panel, bars, unit) for i, panel in enumerate(panels)]
    heading = tag("h3", about, id=f"speed-{name}")
    return join([heading, tag("div", *charts, class_="grid"), made_by([record])])


def _panel(key: str, panel: str, bars: list[Bar], unit: str) -> Html:
    groups: dict[str, dict[str, float]] = {}
    for bar in bars:
        if bar.panel == panel:
            groups.setdefault(bar.group, {})[bar.name] = bar.ratio
    words = Words(key, panel, "The line is at 1, where it costs nothing.")
    return bar_chart(words, [Bars(group, values) for group, values in groups.items()], unit, base=1.0)
