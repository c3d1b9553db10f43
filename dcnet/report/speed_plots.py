"""Charts of benchmark records: times relative to the plain layer or network, and costs of heads."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from dcnet.operator import PLAIN
from dcnet.report.chart import Axis, BarChart, BarGroup, Line, LineChart
from dcnet.report.drawing import draw_bars, draw_lines, legend_below, literal
from dcnet.report.network_tables import network_names
from dcnet.report.speed_cells import Record, Row, count_blocks, form, spell, where
from dcnet.report.speed_tables import BLOCKS, LAYERS, Variants, base_title

GIB_OF_MIB = 1 / 1024
# What the times of each benchmark are relative to; for layers see `base_title`.
BASES = {
    "blocks": BLOCKS.title,
    "network": "plain network",
    "inference": "folded plain network",
}
HEADS = {
    "linear": "nn.Linear and cross entropy",
    "margin": "MarginSoftmax",
    "sharded": "ShardedMarginSoftmax, one share",
    "sampled": "ShardedMarginSoftmax, {:.0%} sampled",
}
MARKERS = dict(zip(HEADS, "os^D", strict=True))
FLOOR = "lower bound, all classes"


def benchmark_plot(record: Record) -> Figure:
    """Draws the record of any benchmark."""
    return head_plot(record) if record["benchmark"] == "heads" else speed_plot(record)


def speed_plot(record: Record) -> Figure:
    """Draws times relative to the plain layer or network, with a panel per chart of `speed_charts`."""
    charts = speed_charts(record)
    if not charts:
        raise ValueError(f"the record of {record['benchmark']!r} has no times to draw")
    groups = list(dict.fromkeys(group.name for chart in charts for group in chart.groups))
    series = list(dict.fromkeys(name for chart in charts for name in chart.series))
    bars = len(groups) * len(series)
    width = max(7.0, 2.0 + (0.5 if len(series) < 4 else 0.36) * bars)
    figure = Figure(figsize=(width, 1.6 + 2.3 * len(charts)), layout="constrained")
    rows = figure.subplots(len(charts), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max(value for chart in charts for group in chart.groups for value in group.values.values())
    for axes, chart in zip(rows, charts, strict=True):
        draw_bars(axes, chart, groups, series)
        axes.set(ylim=(0, 1.15 * highest))
    figure.suptitle(literal(speed_title(record)))
    legend_below(figure, 5, rows[:1])
    return figure


def speed_charts(record: Record) -> list[BarChart]:
    """Returns a chart per operator, mode or network, depending on the benchmark."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for panel, group, name, ratio in BARS[record["benchmark"]](record):
        if math.isfinite(ratio):
            panels.setdefault(panel, {}).setdefault(group, {})[name] = ratio
    base = base_title(record) if record["benchmark"] == "layers" else BASES[record["benchmark"]]
    unit, about = f"time, x {base}", "The dashed line is at 1, no extra cost."
    return [
        BarChart(panel, unit, [BarGroup(group, values) for group, values in groups.items()], base=1.0, about=about)
        for panel, groups in panels.items()
    ]


# The names of panel, group of bars and series, and the ratio.
Bar = tuple[str, str, str, float]


def _variant_bars(record: Record, variants: Variants) -> Iterator[Bar]:
    """Yields the bars of layers or blocks: a panel per operator, a group per shape, and a series per variant.

    With a single shape, there is one panel with a group per operator. With a single variant and several shapes, there
    is one panel with a series per operator.
    """
    rows = [
        row for row in record["results"] if row["variant"] not in variants.bases and "ratio" in row.get("training", {})
    ]
    several = len(record["config"]["shapes"]) > 1
    one_variant = several and len({row["variant"] for row in rows}) == 1
    for row in rows:
        operator, shape, variant = row["operator"], spell(row["shape"]), variants.names[row["variant"]]
        names = (operator, shape, variant) if several else (shape, operator, variant)
        yield (*((variant, shape, operator) if one_variant else names), row["training"]["ratio"])


def _network_bars(record: Record) -> Iterator[Bar]:
    """Yields a panel per mode, a group per batch size, or per network if there are several, a series per operator."""
    several = len(network_names(record)) > 1
    for row in record["results"]:
        if row["operator"] != PLAIN and "ratio" in row.get("training", {}):
            batch = f"batch {row['batch']}"
            group = f"{row['model'].removeprefix('timm:')}, {batch}" if several else batch
            yield row["mode"], group, row["operator"], row["training"]["ratio"]


def _inference_bars(record: Record) -> Iterator[Bar]:
    for row in record["results"]:
        if "ratio" in row.get("forward", {}):
            yield row["network"], row["operator"], form(row), row["forward"]["ratio"]


BARS: dict[str, Callable[[Record], Iterator[Bar]]] = {
    "layers": functools.partial(_variant_bars, variants=LAYERS),
    "blocks": functools.partial(_variant_bars, variants=BLOCKS),
    "network": _network_bars,
    "inference": _inference_bars,
}


def speed_title(record: Record) -> str:
    """Returns a title: what was timed, in which precision, and on which device."""
    config = record["config"]
    what = {
        "layers": "Forward and backward of one layer",
        "blocks": f"Forward and backward of {count_blocks(record)}",
        "network": "Training step",
        "inference": "Forward pass in evaluation",
    }[record["benchmark"]]
    if record["benchmark"] == "network" and len(network_names(record)) == 1:
        what += f" of {network_names(record)[0]}"
    return f"{what}, {config.get('dtype', config.get('precision'))}, {where(record)}"


def head_plot(record: Record) -> Figure:
    """Draws time and peak memory of a step by the number of classes, with two panels per batch size."""
    if not any("training" in row for row in record["results"]):
        raise ValueError("the record of 'heads' has no times to draw")
    batches = [batch for batch in record["config"]["batches"] if _rows(record, batch)]
    figure = Figure(figsize=(12, 1.9 + 4.1 * len(batches)), layout="constrained")
    grid = figure.subplots(len(batches), 2, sharex=True, sharey="col", squeeze=False)
    for (left, right), batch in zip(grid, batches, strict=True):
        time, memory = head_charts(record, batch)
        draw_lines(left, time)
        draw_lines(right, memory)
        _draw_limits(right, record, batch)
        for axes in (left, right):
            axes.tick_params(labelbottom=True, labelleft=True)
    figure.suptitle(f"Forward, backward and SGD of a head: {literal(head_title(record))}")
    legend_below(figure, 3)
    return figure


def head_title(record: Record) -> str:
    config = record["config"]
    return f"{config['margin']}, {config['features']} features, {config['dtype']}, {where(record)}"


def head_charts(record: Record, batch: int) -> tuple[LineChart, LineChart]:
    """Returns charts of time and peak memory by the number of classes; lower bounds are for heads without sampling."""
    rows = _rows(record, batch)
    times = [(row, row["training"]["ms"]) for row in rows if "training" in row]
    sizes = [(row, row["peak_mib"] * GIB_OF_MIB) for row in rows if row.get("peak_mib")]
    unsampled = [row for row in rows if row["head"] != "sampled"]
    least_time = [(row, row["floor_ms"]) for row in unsampled]
    least_size = [(row, row["floor_mib"] * GIB_OF_MIB) for row in unsampled]
    return (
        _head_chart(record, f"Time, batch {batch}", "time of a step, ms", times, least_time),
        _head_chart(record, f"Memory, batch {batch}", "peak memory, GiB", sizes, least_size),
    )


Values = Sequence[tuple[Row, float]]


def _head_chart(record: Record, title: str, unit: str, values: Values, floor: Values) -> LineChart:
    lines = []
    for i, head in enumerate(record["config"]["heads"]):
        # A share costs as much as the whole head; the line below is visible between dashes.
        style = {"color": f"C{i}", "marker": MARKERS[head], "linestyle": "--" if head == "sharded" else "-"}
        own = [(row, value) for row, value in values if row["head"] == head]
        lines.append(_line(HEADS[head].format(record["config"]["sample"]), own, {**style, "linewidth": 2}))
    lines.append(_line(FLOOR, floor, {"color": "0.5", "linestyle": "-."}))
    x, y = Axis("classes", log=True), Axis(unit, log=True)
    return LineChart(title, x, y, [line for line in lines if line.x], "Both axes are logarithmic.")


def _line(name: str, values: Values, style: Mapping[str, Any]) -> Line:
    points = dict(sorted((row["classes"], value) for row, value in values))
    return Line(name, list(points), list(points.values()), dots=True, style=style)


def _draw_limits(axes: Any, record: Record, batch: int) -> None:
    """Draws the predicted memory of heads that were skipped, and the free memory."""
    for i, head in enumerate(record["config"]["heads"]):
        own = [row for row in _rows(record, batch) if row["head"] == head and row["skipped"]]
        points = [(row["classes"], row["needed_mib"] * GIB_OF_MIB) for row in own]
        if points:
            style = {"color": f"C{i}", "marker": "x", "linestyle": "", "markersize": 9}
            axes.plot(*zip(*points, strict=True), **style, label=f"{head}: does not fit, predicted")
    if record.get("free_gib"):
        axes.axhline(record["free_gib"], color="0.2", linewidth=1, linestyle=":", label="free memory")


def _rows(record: Record, batch: int) -> list[Row]:
    return [row for row in record["results"] if row["batch"] == batch]
