"""Records of runs as curves: test error, training loss and learning rate by epoch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.escapes import literal
from dcnet.report.curve_labels import common_words, labels
from dcnet.training.config import completed
from dcnet.training.summary import grouped

Record = dict[str, Any]
Metric = Literal["error", "accuracy"]
COLORS = 10
FEW_POINTS = 12


@dataclass(frozen=True)
class Curve:
    """One value over the epochs, of runs that differ in nothing but the seed: the mean and the extremes."""

    epochs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def run_curves(records: Sequence[Record], metric: Metric = "error") -> Figure:
    """Draws test error or accuracy above training loss above learning rate; seeds are a mean in a band."""
    groups = list(grouped(records).values())
    tests, losses = [_test_curve(group, metric) for group in groups], [_curve(group, "train_loss") for group in groups]
    figure = Figure(figsize=(8.5, 8.5), layout="constrained")
    test, loss, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.3))
    for i, name in enumerate(map(literal, labels(groups))):
        _draw(test, tests[i], i, name)
        _draw(loss, losses[i], i, name)
    _show_late(test, tests, metric)
    _scale(loss, losses, least=1e-12)
    _draw_rates(rate, groups)
    test.set_ylabel(f"test {metric}, %")
    loss.set_ylabel("training loss")
    rate.set(ylabel="learning rate", xlabel="epoch")
    for axes in (test, loss, rate):
        _draw_drops(axes, records)
    _finish(figure, test, groups)
    return figure


def _test_curve(members: Sequence[Record], metric: Metric) -> Curve:
    accuracy = _curve(members, "test_accuracy")
    if metric == "accuracy":
        return accuracy
    mean, low, high = ([100 - value for value in part] for part in (accuracy.mean, accuracy.high, accuracy.low))
    return Curve(accuracy.epochs, mean, low, high)


def _curve(members: Iterable[Record], name: str) -> Curve:
    """Over the runs that have got so far; what was not finite is left out."""
    found: dict[float, list[float]] = {}
    for record in members:
        for epoch, value in zip(record["curves"]["epoch"], record["curves"][name], strict=True):
            found.setdefault(epoch, []).extend([] if value is None else [value])
    points = sorted((epoch, values) for epoch, values in found.items() if values)
    means = [sum(values) / len(values) for _, values in points]
    return Curve([at for at, _ in points], means, [min(v) for _, v in points], [max(v) for _, v in points])


def _draw(axes: Axes, curve: Curve, i: int, name: str) -> None:
    color, style = f"C{i % COLORS}", "-" if i < COLORS else "--"
    marker = "o" if len(curve.epochs) < FEW_POINTS else ""
    axes.plot(curve.epochs, curve.mean, style, marker=marker, markersize=3.5, color=color, label=name, linewidth=1.6)
    if curve.low != curve.high:
        axes.fill_between(curve.epochs, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)


def _show_late(axes: Axes, curves: Sequence[Curve], metric: Metric) -> None:
    """Leaves the first quarter out of the limits, where curves come from chance and would flatten the rest."""
    whole = [value for curve in curves for value in (*curve.low, *curve.high)]
    late = [value for curve in curves for value in _late(curve)]
    if late:
        low, high = (min(whole), max(late)) if metric == "error" else (min(late), max(whole))
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _late(curve: Curve) -> list[float]:
    begin = len(curve.epochs) // 4
    return [*curve.low[begin:], *curve.high[begin:]]


def _draw_rates(axes: Axes, groups: Sequence[Sequence[Record]]) -> None:
    """The learning rates of the first run of each group, or of one for all if they are the same."""
    curves = [_curve(members[:1], "learning_rate") for members in groups]
    same = all(curve == curves[0] for curve in curves)
    for i, curve in enumerate(curves[:1] if same else curves):
        # What is written down is the learning rate of the epoch that ends there.
        style = "steps-pre" if _falls_in_steps(groups[i][0]) else "default"
        axes.plot(curve.epochs, curve.mean, color="0.25" if same else f"C{i % COLORS}", drawstyle=style)
    # Drops to a tenth are steps of one height on a log scale, but a cosine that ends at zero falls out of it.
    _scale(axes, curves, least=1e-4)


def _falls_in_steps(record: Record) -> bool:
    return completed(record["config"])["schedule"]["name"] in ("step", "plateau")


def _scale(axes: Axes, curves: Sequence[Curve], least: float) -> None:
    """A log scale where values differ by more than tenfold, unless the smallest is next to nothing."""
    values = [value for curve in curves for value in curve.low + curve.high]
    ratio = min(values) / max(values) if values and max(values) > 0 else 1.0
    if least <= ratio < 0.1:
        axes.set_yscale("log")
    elif values:
        axes.set_ylim(bottom=0)


def _draw_drops(axes: Axes, records: Sequence[Record]) -> None:
    """Dotted lines where a schedule that drops has dropped the learning rate."""
    for epoch in sorted({epoch for record in records for epoch in _drops(record)}):
        axes.axvline(epoch, color="0.6", linestyle=":", linewidth=1, zorder=0)
    axes.grid(color="0.92")
    axes.margins(x=0.02)


def _drops(record: Record) -> list[float]:
    if not _falls_in_steps(record):
        return []
    rates, epochs = record["curves"]["learning_rate"], record["curves"]["epoch"]
    return [epochs[i] for i in range(len(rates) - 1) if rates[i + 1] < 0.9 * rates[i]]


def _finish(figure: Figure, axes: Axes, groups: Sequence[Sequence[Record]]) -> None:
    several = max(len(members) for members in groups) > 1
    figure.suptitle(literal(common_words(groups)) + (": mean and range over seeds" if several else ""))
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(4, math.floor(100 / (max(map(len, names)) + 8))))
    figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)), frameon=False)
