"""How well a network tells pairs apart, and what it says of one, as tables."""

from typing import Any

from dcnet.report.listing import Listing
from dcnet.verification import Calibration, Decision

Record = dict[str, Any]
VERDICTS = {True: "same", False: "different", None: "too close to call"}


def measures(found: Record) -> Listing:
    """The measures of a report as a table."""
    folds = f"{found['folds']} folds, threshold of the other {found['folds'] - 1}"
    rows = [
        _accuracy_row(f"accuracy, {folds}", found["accuracy"]),
        _accuracy_row("balanced accuracy, the same folds", found["balanced_accuracy"]),
        {"measure": "area under the ROC curve (AUC)", "value": percent(found["auc"])},
        {"measure": "equal error rate (EER)", "value": percent(found["eer"])},
        *map(_tar_row, found["tar_at_far"]),
        *_retrieval_rows(found.get("retrieval")),
    ]
    columns = {
        "measure": lambda row: row["measure"],
        "value, %": lambda row: row["value"],
        "threshold": lambda row: row.get("threshold", ""),
    }
    return Listing("", columns, rows, ("value, %", "threshold"), ("measure",))


def _accuracy_row(name: str, found: Record) -> Record:
    value = f"{percent(found['mean'])} ± {percent(found['standard_error'])}"
    return {"measure": name, "value": value, "threshold": f"{found['threshold']:.3f}"}


def _tar_row(found: Record) -> Record:
    name = f"true accepts at {100 * found['far']:g} % false accepts (TAR@FAR)"
    if found["tar"] is None:
        return {"measure": name, "value": "too few pairs"}
    return {"measure": name, "value": percent(found["tar"]), "threshold": f"{found['threshold']:.3f}"}


def _retrieval_rows(found: Record | None) -> list[Record]:
    """None for pairs whose images have no classes."""
    if found is None:
        return []
    of = f"{found['queries']:,} images, each among {found['gallery']:,} others"
    recall = [{"measure": f"recall@{at['k']}, {of}", "value": percent(at["recall"])} for at in found["recall"]]
    precision = {"measure": "mean average precision (mAP) of these", "value": percent(found["mean_average_precision"])}
    return [*recall, precision]


def percent(share: float) -> str:
    """A share in percent, without the sign."""
    return f"{100 * share:.2f}"


def rates(decision: Decision) -> list[Record]:
    """Where a decision changes, and the error rates if there were no other threshold: one row, or two."""
    upper = {
        "verdict": "same from",
        "threshold": decision.upper,
        "false_accepts": decision.far,
        "false_rejects": decision.frr + decision.open_genuine,
    }
    lower = {
        "verdict": "different below",
        "threshold": decision.lower,
        "false_accepts": decision.far + decision.open_impostor,
        "false_rejects": decision.frr,
    }
    return [upper, lower]


def thresholds(decision: Decision) -> Listing:
    """The thresholds of a decision as a table."""
    columns = {
        "": lambda row: row["verdict"],
        "cosine": lambda row: f"{row['threshold']:.3f}",
        "false accepts, %": lambda row: percent(row["false_accepts"]),
        "false rejects, %": lambda row: percent(row["false_rejects"]),
    }
    return Listing("", columns, rates(decision), list(columns)[1:])


def source(calibration: Calibration) -> str:
    """Which pairs the thresholds are from, in a sentence."""
    decision, data = calibration.decision, calibration.data
    count = f"{decision.genuine + decision.impostor:,} pairs"
    return f"calibrated by {count}, {decision.genuine:,} of them the same, of {data.get('list')}"
