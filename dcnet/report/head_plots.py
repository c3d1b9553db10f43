"""The record of heads as a picture: time and memory by the number of classes, beside the least there is."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.escapes import literal
from dcnet.report.words import Record, where

Row = Mapping[str, Any]
Points = list[tuple[int, float]]
GIB_OF_MIB = 1 / 1024
# By the names of the record; the sampled one is told how large its sample is.
LABELS = {
    "linear": "nn.Linear and cross entropy",
    "margin": "MarginSoftmax",
    "sharded": "ShardedMarginSoftmax, one share",
    "sampled": "ShardedMarginSoftmax, {:.0%} sampled",
}
MARKS = dict(zip(LABELS, ("o", "s", "^", "D"), strict=True))


def head_costs(record: Record) -> Figure:
    """Draws time and peak memory of a step by the number of classes, a row of two panels for each batch."""
    if not any("training" in row for row in record["results"]):
        raise ValueError("nothing was timed in this record of 'heads', so there is nothing to draw")
    config = record["config"]
    batches = [batch for batch in config["batches"] if any(row["batch"] == batch for row in record["results"])]
    figure = Figure(figsize=(12, 1.9 + 4.1 * len(batches)), layout="constrained")
    grid = figure.subplots(len(batches), 2, sharex=True, sharey="col", squeeze=False)
    for (left, right), batch in zip(grid, batches, strict=True):
        rows = [row for row in record["results"] if row["batch"] == batch]
        _draw_time(left, rows, config, f"Time, batch {batch}")
        _draw_memory(right, rows, config, record.get("free_gib"), f"Memory, batch {batch}")
    about = f"{config['margin']}, {config['features']} features, {config['dtype']}, {where(record)}"
    figure.suptitle(f"Forward, backward and SGD of a head: {literal(about)}")
    handles = {label: handle for axes in figure.axes for handle, label in zip(*_legend(axes), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _legend(axes: Axes) -> tuple[list[Any], list[Any]]:
    return axes.get_legend_handles_labels()


def _draw_time(axes: Axes, rows: Sequence[Row], config: Row, title: str) -> None:
    for i, head in enumerate(config["heads"]):
        own = [row for row in rows if row["head"] == head]
        _draw(axes, head, config, i, [(row["classes"], row["training"]["ms"]) for row in own if "training" in row])
    _draw_floor(axes, rows, "floor_ms", 1.0)
    _finish(axes, title, "time of a step, ms")


def _draw_memory(axes: Axes, rows: Sequence[Row], config: Row, free: float | None, title: str) -> None:
    for i, head in enumerate(config["heads"]):
        own = [row for row in rows if row["head"] == head]
        weighed = [row for row in own if row.get("peak_mib")]
        _draw(axes, head, config, i, [(row["classes"], row["peak_mib"] * GIB_OF_MIB) for row in weighed])
        left_out = [(row["classes"], row["needed_mib"] * GIB_OF_MIB) for row in own if row["skipped"]]
        if left_out:
            label = f"{head}: does not fit, predicted"
            axes.plot(*zip(*left_out, strict=True), color=f"C{i}", marker="x", linestyle="", markersize=9, label=label)
    _draw_floor(axes, rows, "floor_mib", GIB_OF_MIB)
    if free:
        axes.axhline(free, color="0.2", linewidth=1, linestyle=":", label="memory that was free")
    _finish(axes, title, "peak memory, GiB")


def _draw(axes: Axes, head: str, config: Row, i: int, points: Points) -> None:
    if points:
        # A share costs what the whole head does: the dashes of one show the other.
        label, dashes = LABELS[head].format(config["sample"]), "--" if head == "sharded" else "-"
        axes.plot(*zip(*points, strict=True), f"C{i}{MARKS[head]}{dashes}", linewidth=2, label=label)


def _draw_floor(axes: Axes, rows: Sequence[Row], entry: str, unit: float) -> None:
    """The least of any head that uses all of its classes."""
    floor = {row["classes"]: row[entry] * unit for row in rows if row["head"] != "sampled"}
    if floor:
        axes.plot(*zip(*floor.items(), strict=True), color="0.5", linestyle="-.", label="least there is, all classes")


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="classes", ylabel=ylabel, xscale="log", yscale="log")
    axes.tick_params(labelbottom=True, labelleft=True)
    axes.grid(color="0.9", which="major")
