"""Training curves of runs: labels, means over seeds, and figures of error, loss and learning rate by epoch."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.operator import is_plain
from dcnet.report.drawing import legend_below, literal
from dcnet.training import Record
from dcnet.training.session import group_by_seed

Config = dict[str, Any]
Groups = Sequence[Sequence[Record]]
# Formats a value, given its name.
Format = Callable[[str, Any], str]

# Labels show only the values of these settings, in this order, and all others as name=value.
UNNAMED = ("dataset", "model", "operator")
# Settings without effect on a plain network.
DECOUPLED_ONLY = ("projection_every", "weighted_gradients", "orthonormal")
# The only setting that may be a path; slashes in other settings, such as an adversary, belong to fractions.
PATH = "pretrained"


def labels(groups: Groups) -> list[str]:
    """Returns a label per group of runs: the settings that differ between groups, and the number of runs."""
    configs = [members[0].settings for members in groups]
    short = _labels(configs, _short)
    # If short labels coincide, as for two schedules of the same name, show all values.
    found = short if len(set(short)) == len(short) else _labels(configs, _whole)
    return [label + mean_of(members) for label, members in zip(found, groups, strict=True)]


def common_words(groups: Groups) -> str:
    """Returns those of dataset, network and operator that are the same for all groups."""
    configs = [members[0].settings for members in groups]
    return ", ".join(configs[0][name] for name in UNNAMED if not _differs(configs, name))


def _differing(configs: Sequence[Config]) -> list[str]:
    every = dict.fromkeys(name for config in configs for name in config)
    names = [*UNNAMED, *(name for name in every if name not in (*UNNAMED, "seed", "recipe"))]
    # The recipe counts only if all other values are the same.
    return [name for name in names if _differs(configs, name)] or ["recipe"] * _differs(configs, "recipe")


def _differs(configs: Sequence[Config], name: str) -> bool:
    if name in DECOUPLED_ONLY:
        configs = [config for config in configs if not is_plain(config["operator"])]
    return any(config.get(name) != configs[0].get(name) for config in configs)


def _only_differing_parts(config: Config, configs: Sequence[Config], names: Sequence[str]) -> Config:
    """Returns the config with only the differing entries of its mappings; mappings with a name stay whole."""
    shown = dict(config)
    for name in names:
        values = [value for other in configs if isinstance(value := other.get(name), dict) and "name" not in value]
        if len(values) == len(configs):
            shown[name] = {key: part for key, part in config[name].items() if any(v.get(key) != part for v in values)}
    return shown


def _labels(configs: Sequence[Config], formatted: Format) -> list[str]:
    names = _differing(configs) or ["operator"]
    shown = [_only_differing_parts(config, configs, names) for config in configs]
    # Skip settings whose values look the same, such as two schedules of the same name.
    useful = [name for name in names if len({formatted(name, config.get(name)) for config in shown}) > 1] or names
    return [_label(config, useful, formatted) for config in shown]


def _label(config: Config, names: Sequence[str], formatted: Format) -> str:
    # Omit settings that are None, unless there are no others.
    names = [name for name in names if config.get(name) is not None] or names
    return ", ".join(
        str(config[name]) if name in UNNAMED else f"{name}={formatted(name, config.get(name))}" for name in names
    )


def _short(name: str, value: Any) -> str:
    """Formats a value briefly: only the name of a schedule, few digits, and the last part of a path."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, str) and name == PATH:
        return Path(value).name
    return f"{value:g}" if isinstance(value, float) else _whole(name, value)


def _whole(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = ",".join(f"{key}={part}" for key, part in value.items() if key != "name")
    return f"{value['name']}({parts})" if "name" in value else parts


def mean_of(members: Sequence[Record]) -> str:
    """Returns a suffix for a label such as ", mean of 3": the number of runs, or its range over the points."""
    lengths = [len(record.curves) for record in members]
    if len(members) == 1:
        return ""
    least = sum(length == max(lengths) for length in lengths)
    return f", mean of {len(members)}" if least == len(members) else f", mean of {least} to {len(members)}"


Metric = Literal["error", "accuracy"]
COLORS = 10
FEW_POINTS = 12


@dataclass(frozen=True)
class Curve:
    """Mean, minimum and maximum over runs that differ only in the seed, by epoch or step `x`."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def run_curves(records: Sequence[Record], metric: Metric = "error") -> Figure:
    """Draws test error or accuracy, training loss and learning rate, with mean and range over seeds.

    If all runs were also evaluated with refreshed statistics, draws these evaluations instead of the usual ones.
    """
    groups = list(group_by_seed(records).values())
    refreshed = all(is_refreshed(record) for record in records)
    tests = [mean_curve(group, f"{'refreshed' if refreshed else 'test'}_{metric}") for group in groups]
    losses = [mean_curve(group, "train_loss") for group in groups]
    figure = Figure(figsize=(8.5, 8.5), layout="constrained")
    test, loss, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.3))
    for i, name in enumerate(map(literal, labels(groups))):
        _draw(test, tests[i], i, name)
        _draw(loss, losses[i], i, name)
    _show_late(test, tests, metric)
    _scale(loss, losses, least=1e-12)
    _draw_rates(rate, groups)
    test.set_ylabel(f"test {metric}, %" + ("\n(refreshed statistics)" if refreshed else ""))
    loss.set_ylabel("training loss")
    rate.set(ylabel="learning rate", xlabel="epoch")
    for axes in (test, loss, rate):
        _draw_drops(axes, records)
    _finish(figure, test, groups)
    return figure


def is_refreshed(record: Record) -> bool:
    """Whether the run was evaluated with refreshed statistics at every point."""
    values = record.curves.refreshed_accuracy
    return bool(values) and None not in values


def figure4_records(records: Iterable[Record]) -> list[Record]:
    """Returns the records that Figure 4 shows: those with refreshed statistics if there are two or more.

    With the momentum of the paper's recipe, the running statistics lag behind training, and usual evaluations say
    little before the first drop of the learning rate.
    """
    found = [record for record in records if record.curves.step]
    refreshed = [record for record in found if is_refreshed(record)]
    return refreshed if len(group_by_seed(refreshed)) > 1 else found


def mean_curve(members: Iterable[Record], name: str, by: Literal["epoch", "step"] = "epoch") -> Curve:
    """Returns the mean, at each point, of the finite values of the runs that reached it.

    Args:
        members: runs that differ only in the seed.
        name: the name of a curve in the records, "test_error" or "refreshed_error".
        by: what the curve is a function of.
    """
    found: dict[float, list[float]] = {}
    for record in members:
        for at, value in zip(getattr(record.curves, by), _values(record, name), strict=True):
            found.setdefault(at, []).extend([] if value is None else [value])
    points = sorted((at, values) for at, values in found.items() if values)
    means = [sum(values) / len(values) for _, values in points]
    return Curve([at for at, _ in points], means, [min(v) for _, v in points], [max(v) for _, v in points])


def _values(record: Record, name: str) -> list[float | None]:
    if name.endswith("_error"):
        accuracies = _values(record, name.replace("_error", "_accuracy"))
        return [None if value is None else 100 - value for value in accuracies]
    values: list[float | None] = getattr(record.curves, name)
    return values


def _draw(axes: Axes, curve: Curve, i: int, name: str) -> None:
    color, style = f"C{i % COLORS}", "-" if i < COLORS else "--"
    marker = "o" if len(curve.x) < FEW_POINTS else ""
    axes.plot(curve.x, curve.mean, style, marker=marker, markersize=3.5, color=color, label=name, linewidth=1.6)
    if curve.low != curve.high:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)


def _show_late(axes: Axes, curves: Sequence[Curve], metric: Metric) -> None:
    """Sets the limits of the y axis; ignores the first quarter of the run, where errors are large."""
    whole = [value for curve in curves for value in (*curve.low, *curve.high)]
    late = [value for curve in curves for values in (curve.low, curve.high) for value in values[len(values) // 4 :]]
    if late:
        low, high = (min(whole), max(late)) if metric == "error" else (min(late), max(whole))
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _draw_rates(axes: Axes, groups: Sequence[Sequence[Record]]) -> None:
    """Draws the learning rate of the first run of each group, only once if it is the same for all."""
    curves = [mean_curve(members[:1], "learning_rate") for members in groups]
    same = all(curve == curves[0] for curve in curves)
    for i, curve in enumerate(curves[:1] if same else curves):
        # A point has the learning rate before it, so steps extend to the left.
        style = "steps-pre" if _falls_in_steps(groups[i][0]) else "default"
        axes.plot(curve.x, curve.mean, color="0.25" if same else f"C{i % COLORS}", drawstyle=style)
    # Do not use a log scale for a cosine schedule, which ends at zero.
    _scale(axes, curves, least=1e-4)


def _falls_in_steps(record: Record) -> bool:
    return record.settings["schedule"]["name"] in ("step", "plateau")


def _scale(axes: Axes, curves: Sequence[Curve], least: float) -> None:
    """Uses a log scale if the ratio of smallest to largest value is from `least` to 0.1."""
    values = [value for curve in curves for value in curve.low + curve.high]
    ratio = min(values) / max(values) if values and max(values) > 0 else 1.0
    if least <= ratio < 0.1:
        axes.set_yscale("log")
    elif values:
        axes.set_ylim(bottom=0)


def _draw_drops(axes: Axes, records: Sequence[Record]) -> None:
    """Draws dotted lines where the learning rate dropped."""
    for epoch in sorted({epoch for record in records for epoch in _drops(record)}):
        axes.axvline(epoch, color="0.6", linestyle=":", linewidth=1, zorder=0)
    axes.grid(color="0.92")
    axes.margins(x=0.02)


def _drops(record: Record) -> list[float]:
    if not _falls_in_steps(record):
        return []
    rates, epochs = record.curves.learning_rate, record.curves.epoch
    return [epochs[i] for i in range(len(rates) - 1) if rates[i + 1] < 0.9 * rates[i]]


def _finish(figure: Figure, axes: Axes, groups: Sequence[Sequence[Record]]) -> None:
    several = max(len(members) for members in groups) > 1
    figure.suptitle(literal(common_words(groups)) + (": mean and range over seeds" if several else ""))
    _, names = axes.get_legend_handles_labels()
    columns = max(1, min(4, math.floor(100 / (max(map(len, names)) + 8))))
    legend_below(figure, columns, [axes])
