"""Tables and plots of verification: measures, thresholds, ROC curve and scores."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet.report.drawing import literal
from dcnet.report.robustness_report import percent
from dcnet.table import Cells, Table
from dcnet.verification import Calibration, Decision, Roc

Record = dict[str, Any]


# Kinds of pairs that differ more in number make the plain accuracy meaningless.
MOST_RATIO = 3


def measures(found: Record) -> Table:
    """Returns the table of measures of a verification report."""
    folds = f"{found['folds']} folds, threshold from the other{_count(found)}"
    rows = [
        _accuracy_row(f"balanced accuracy, {folds}", found["balanced_accuracy"]),
        *([_accuracy_row("accuracy, the same folds", found["accuracy"])] if _similar(found["data"]) else []),
        ["area under the ROC curve (AUC)", percent(found["auc"])],
        ["equal error rate (EER)", percent(found["eer"])],
        *map(_tar_row, found["tar_at_far"]),
        *_retrieval_rows(found.get("retrieval")),
    ]
    return Table.of_rows(["measure", "value, %", "95 % interval", "threshold"], rows, notes=[found["interval"]])


def _count(found: Record) -> str:
    """The number of the other folds, with a space before it; nothing if there is one."""
    return f" {found['folds'] - 1}" if found["folds"] > 2 else ""


def _similar(counts: Record) -> bool:
    """Whether the kinds of pairs are similar in number; otherwise plain accuracy says little."""
    return max(counts["same"], counts["different"]) <= MOST_RATIO * min(counts["same"], counts["different"])


def _accuracy_row(name: str, found: Record) -> list[str]:
    value = f"{percent(found['mean'])} ± {percent(found['standard_error'])}"
    return [name, value, "", f"{found['threshold']:.3f}"]


def _tar_row(found: Record) -> list[str]:
    name = f"true accepts at {100 * found['far']:g} % false accepts (TAR@FAR)"
    if found["tar"] is None:
        return [name, "too few pairs"]
    low, high = found.get("low"), found.get("high")
    interval = "" if low is None or high is None else f"{percent(low)} to {percent(high)}"
    return [name, percent(found["tar"]), interval, f"{found['threshold']:.3f}"]


def transfers(found: Record) -> Table:
    """Returns the table of thresholds from other pairs: from other folds, and from the calibration of the run."""
    name = f"the other{_count(found)} fold{'s' if found['folds'] > 2 else ''}"
    rows = [_transfer_row(name, at) for at in found["transfer"]]
    if at := found["calibrated"]:
        rows.append(_transfer_row(f"the calibration on {'these pairs' if at['same_pairs'] else at['list']}", at))
    head = ["threshold from", "score", "wanted FAR, %", "FAR, %", "TAR, %", "TAR with own threshold, %", "loss"]
    note = "loss: how much more TAR a threshold from the same pairs has; below 0 if the FAR is above the wanted one"
    return Table.of_rows(head, rows, title="Thresholds from other pairs", notes=[note])


def _transfer_row(name: str, found: Record) -> list[str]:
    rates = [f"{100 * found['wanted_far']:g}", f"{100 * found['far']:#.3g}", percent(found["tar"])]
    return [name, f"{found['threshold']:.3f}", *rates, percent(found["own_tar"]), percent(found["loss"])]


def norms(found: Record) -> Table:
    """Returns the table of norms as a measure of quality: corrected scores, and images of low norm discarded."""
    quality = found["quality"]
    low, middle, high = quality["norms"]
    rows = [
        [f"true accepts at {100 * at['far']:g} % false accepts", percent(at["cosine"]), percent(at["corrected"])]
        for at in quality["tar_at_far"]
        if at["cosine"] is not None
    ]
    title = f"Norms as quality: from {low:.3g} to {high:.3g}, median {middle:.3g}"
    head = ["pairs within folds", "by cosine, %", "corrected for norms, %"]
    return Table.of_rows(head, rows, title=title, notes=_discard_notes(quality["discard"]))


def _discard_notes(found: Sequence[Record]) -> list[str]:
    """Returns a line on the false rejects without images of low norm; none with too few pairs."""
    rates = [
        f"{percent(at['frr'])} % without the {100 * at['discarded']:g} % of lowest norm"
        if at["discarded"]
        else f"{percent(at['frr'])} % with all images"
        for at in found
    ]
    return [f"false rejects at the threshold for 1 % false accepts: {', '.join(rates)}"] if rates else []


def _retrieval_rows(found: Record | None) -> list[list[str]]:
    """Returns the rows of retrieval; none if the images of the pairs have no classes."""
    if found is None:
        return []
    of = f"{found['queries']:,} images, each among {found['gallery']:,} others"
    recall = [[f"recall@{at['k']}, {of}", percent(at["recall"])] for at in found["recall"]]
    return [*recall, ["mean average precision (mAP) of these", percent(found["mean_average_precision"])]]


def thresholds(decision: Decision) -> Table:
    """Returns the table of thresholds of a decision."""
    cells: Cells = {
        "": "verdict",
        "score": lambda row: f"{row['threshold']:.3f}",
        "false accepts, %": lambda row: percent(row["false_accepts"]),
        "false rejects, %": lambda row: percent(row["false_rejects"]),
    }
    return Table.of_records(decision.thresholds(), cells, right=list(cells)[1:])


def undecided(decision: Decision) -> str:
    """Describes how many calibration pairs are too close to call."""
    shares = f"{percent(decision.open_genuine)} % of the same and {percent(decision.open_impostor)} % of the different"
    return f"too close to call: {shares} pairs"


def rate_intervals(found: Record) -> str:
    """Describes the intervals of the error rates of a calibration."""
    far, frr = (f"{percent(low)} to {percent(high)} %" for low, high in (found["far"], found["frr"]))
    return f"false accepts {far} from the upper threshold on, false rejects {frr} below the lower one: {found['how']}"


def source(calibration: Calibration) -> str:
    """Describes the pairs that the thresholds are calibrated on."""
    decision, data = calibration.decision, calibration.data
    count = f"{decision.genuine + decision.impostor:,} pairs"
    norms = "" if calibration.quality is None else "; scores are cosines corrected for norms"
    return f"calibrated by {count}, {decision.genuine:,} of them the same, of {data.get('list')}{norms}"


BINS = 60
SAME, DIFFERENT = "tab:blue", "tab:orange"


def roc_plot(title: str, curve: Roc, scores: Tensor, same: Tensor, found: dict[str, Any]) -> Figure:
    """Draws true accepts by false accepts on a log scale, and histograms of the scores."""
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curve(left, curve, found)
    _draw_scores(right, scores.double().cpu(), same.cpu(), found["balanced_accuracy"]["threshold"])
    figure.suptitle(literal(title))
    for axes in (left, right):
        axes.set_axisbelow(True)
        axes.grid(color="0.92")
        # Place the legend below the axes, since a curve may be in any corner.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    return figure


def _draw_curve(axes: Axes, curve: Roc, found: dict[str, Any]) -> None:
    # A log scale has no zero, so a rate of zero is drawn as the rate of half a pair.
    least = min(50 / curve.impostors, 1.0)
    far, tar, name = (100 * curve.far).clamp(min=least), 100 * curve.tar, f"ROC, AUC {100 * found['auc']:.2f} %"
    # Draw steps, since there is no threshold between equal scores.
    axes.plot(far.tolist(), tar.tolist(), color=SAME, drawstyle="steps-post", label=name)
    chance = torch.logspace(math.log10(least), 2, 100).tolist()
    axes.plot(chance, chance, color="0.6", linestyle=":", label="chance")
    _draw_points(axes, found, least)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlim=(least, 100), ylim=(0, 102), title="ROC: accepted pairs at every threshold")
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
    axes.axvline(
        threshold, color="0.2", linestyle="--", label=f"best balanced threshold, mean of folds, {threshold:.3f}"
    )
    axes.set(title="Scores", xlabel="cosine of the two embeddings", ylabel="pairs of the kind, % in each bar")
