"""The record of a benchmark as a picture: what everything costs, as a multiple of the plain layer or network."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.escapes import literal
from dcnet.report.words import VARIANTS, Record, form, spell, where

BARS_WIDTH = 0.84


@dataclass(frozen=True)
class Bar:
    """One ratio: the panel it belongs to, the group of bars there, and the bar's own name."""

    panel: str
    group: str
    name: str
    ratio: float


def speed(record: Record) -> Figure:
    """Draws the ratios to torch's own layers: by shape and operator, batch size and mode, or network, as measured."""
    bars = [bar for bar in BARS[record["benchmark"]](record) if math.isfinite(bar.ratio)]
    if not bars:
        raise ValueError(f"nothing was timed in this record of {record['benchmark']!r}, so there is nothing to draw")
    panels, groups, names = (_unique(getattr(bar, key) for bar in bars) for key in ("panel", "group", "name"))
    width = max(7.0, 2.0 + 0.5 * len(groups) * len(names)) if len(names) < 4 else 2.0 + 0.36 * len(groups) * len(names)
    figure = Figure(figsize=(width, 1.6 + 2.3 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, [bar for bar in bars if bar.panel == panel], groups, names)
        axes.set(
            title=literal(panel), ylabel=f"time, x {_base(record)}", ylim=(0, 1.15 * max(bar.ratio for bar in bars))
        )
    figure.suptitle(literal(_title(record)))
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    return figure


def _draw_panel(axes: Axes, bars: Sequence[Bar], groups: Sequence[str], names: Sequence[str]) -> None:
    width = BARS_WIDTH / len(names)
    heights = {(bar.group, bar.name): bar.ratio for bar in bars}
    for i, name in enumerate(names):
        ratios = [heights.get((group, name), math.nan) for group in groups]
        places = [place - BARS_WIDTH / 2 + (i + 0.5) * width for place in range(len(groups))]
        drawn = axes.bar(places, ratios, 0.92 * width, label=literal(name), color=f"C{i}", zorder=2)
        labels = ["" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios]
        axes.bar_label(drawn, labels, fontsize=8, padding=1)
    axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1, zorder=3)
    # The last word below the others, where names would run into each other.
    labels = ["\n".join(group.rsplit(" ", 1)) if len(groups) > 3 else group for group in groups]
    axes.set_xticks(range(len(groups)), list(map(literal, labels)))
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", color="0.9", zorder=0)


def _layer_bars(record: Record) -> list[Bar]:
    """A panel for each operator, with the shapes side by side; of one shape the operators are side by side.

    Where there is one variant only, a bar is an operator.
    """
    rows = [row for row in record["results"] if row["variant"] != "conv" and "ratio" in row.get("training", {})]
    variants = _unique(row["variant"] for row in rows)
    if len(variants) == 1 and len(record["config"]["shapes"]) > 1:
        name = VARIANTS[variants[0]]
        return [Bar(name, spell(row["shape"]), row["operator"], row["training"]["ratio"]) for row in rows]
    bars = []
    for row in rows:
        names = row["operator"], spell(row["shape"])
        panel, group = names if len(record["config"]["shapes"]) > 1 else reversed(names)
        bars.append(Bar(panel, group, VARIANTS[row["variant"]], row["training"]["ratio"]))
    return bars


def _network_bars(record: Record) -> list[Bar]:
    rows = [row for row in record["results"] if row["operator"] != "conv" and "ratio" in row.get("training", {})]
    return [Bar(row["mode"], f"batch {row['batch']}", row["operator"], row["training"]["ratio"]) for row in rows]


def _inference_bars(record: Record) -> list[Bar]:
    rows = [row for row in record["results"] if "ratio" in row.get("forward", {})]
    return [Bar(row["network"], row["operator"], form(row), row["forward"]["ratio"]) for row in rows]


BARS = {"layers": _layer_bars, "network": _network_bars, "inference": _inference_bars}


def _base(record: Record) -> str:
    return {"layers": "nn.Conv2d", "network": "plain network", "inference": "folded plain"}[record["benchmark"]]


def _title(record: Record) -> str:
    config = record["config"]
    what = {
        "layers": "Forward and backward of one layer",
        "network": f"Training step of {config.get('model')}",
        "inference": "Forward pass in evaluation",
    }[record["benchmark"]]
    return f"{what}, {config.get('dtype', config.get('precision'))}, {where(record)}"


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
