"""Verification as a picture: what is accepted of each kind at every threshold, and the scores behind it."""

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet.escapes import literal
from dcnet.verification import Roc

BINS = 60
SAME, DIFFERENT = "tab:blue", "tab:orange"


def roc_plot(title: str, curve: Roc, scores: Tensor, same: Tensor, found: dict[str, Any]) -> Figure:
    """Draws true accepts by false accepts, these on a log scale, beside the scores of both kinds of pairs."""
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curve(left, curve, found)
    _draw_scores(right, scores.double().cpu(), same.cpu(), found["accuracy"]["threshold"])
    figure.suptitle(literal(title))
    for axes in (left, right):
        axes.set_axisbelow(True)
        axes.grid(color="0.92")
        # Below, since a curve may lie in any corner.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    return figure


def _draw_curve(axes: Axes, curve: Roc, found: dict[str, Any]) -> None:
    # A log scale has no zero: what is accepted without any false accept stands at half of a pair.
    least = min(50 / curve.impostors, 1.0)
    far, tar, name = (100 * curve.far).clamp(min=least), 100 * curve.tar, f"ROC, AUC {100 * found['auc']:.2f} %"
    # In steps, since there is no threshold between equal scores, and a line there would look like more.
    axes.plot(far.tolist(), tar.tolist(), color=SAME, drawstyle="steps-post", label=name)
    chance = torch.logspace(math.log10(least), 2, 100).tolist()
    axes.plot(chance, chance, color="0.6", linestyle=":", label="chance")
    _draw_points(axes, found, least)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlim=(least, 100), ylim=(0, 102), title="ROC: what is accepted at every threshold")
    axes.set(xlabel=f"false accepts, % of {curve.impostors:,} different pairs")
    axes.set(ylabel=f"true accepts, % of {curve.genuines:,} same pairs")


def _draw_points(axes: Axes, found: dict[str, Any], least: float) -> None:
    eer = 100 * found["eer"]
    axes.plot([max(eer, least)], [100 - eer], "o", color="tab:red", label=f"EER {eer:.2f} %", clip_on=False, zorder=3)
    for at, style in zip(found["tar_at_far"], "s^Dv", strict=True):
        if at["tar"] is not None:
            far, tar = 100 * at["far"], 100 * at["tar"]
            label = f"TAR {tar:.2f} % at FAR {far:g} %"
            axes.plot([far], [tar], style, color="tab:green", label=label, clip_on=False, zorder=3)


def _draw_scores(axes: Axes, scores: Tensor, same: Tensor, threshold: float) -> None:
    low, high = float(scores.min()), float(scores.max())
    edges = torch.linspace(low, high if high > low else low + 0.01, BINS + 1).tolist()
    for kind, color, name in ((same, SAME, "same"), (~same, DIFFERENT, "different")):
        own = scores[kind].tolist()
        weights = [100 / len(own)] * len(own)
        axes.hist(own, edges, weights=weights, color=color, alpha=0.55, label=f"{name}, {len(own):,} pairs")
    axes.axvline(threshold, color="0.2", linestyle="--", label=f"best threshold, mean of folds, {threshold:.3f}")
    axes.set(title="Scores", xlabel="cosine of the two embeddings", ylabel="pairs of the kind, % in each bar")
