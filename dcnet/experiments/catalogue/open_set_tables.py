"""The claim of SphereFace: verification of unseen people (LFW) and unseen classes (CIFAR-100), by loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.experiments.experiment import Cell, Experiment, register, register_evaluation
from dcnet.training import Record, recipe
from dcnet.verification import evaluate_faces, evaluate_open_set

# Smaller scales than the defaults, with which features collapse, since there are few images of many people.
SMALL: dict[str, Any] = {"margin_scale": 16.0}
# Margins that add to the angle also need annealing.
ANGULAR = {**SMALL, "annealing": "auto"}
MARGINS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "m-softmax": {},
    "a-softmax": {},
    "am-softmax": SMALL,
    "arcface": ANGULAR,
    "sphereface-r": SMALL,
    "combined": ANGULAR,
    "subcenter-arcface": ANGULAR,
    "curricularface": ANGULAR,
    "elastic-arcface": ANGULAR,
    "elastic-cosface": SMALL,
    "adaface": SMALL,
    "magface": ANGULAR,
    "uniface": SMALL,
}
# The running mean norm decays faster than by default, since runs are short.
TANH = "tanh(radius=Radius(decay=0.99))-cos"
# The losses that decoupled networks are also trained with.
DECOUPLED = ("softmax", "a-softmax", "am-softmax", "sphereface-r", "adaface")
NETWORKS = [("conv", margin) for margin in MARGINS] + [("tanh-cos", margin) for margin in DECOUPLED]
# By column: the path of its number in the evaluation of the table, or in the results of training.
FACES_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "accuracy": ("development", "accuracy", "mean"),
    "AUC": ("development", "auc"),
    "TAR at FAR 1 %": ("development_all", "tar_at_far", 1, "tar"),
    "TAR at FAR 0.1 %": ("development_all", "tar_at_far", 2, "tar"),
    "TAR at FAR 0.01 %": ("development_all", "tar_at_far", 3, "tar"),
    "ten folds, balanced": ("unseen", "balanced_accuracy", "mean"),
    "ten folds, AUC": ("unseen", "auc"),
}


def _cells(
    name: str,
    columns: Mapping[str, tuple[str | int, ...]],
    settings: Mapping[str, Mapping[str, Any]],
    tanh: str = "tanh-cos",
) -> tuple[Cell, ...]:
    """Returns a row per loss and operator, with the measures of the evaluation `name` or the results of training."""
    cells = []
    for operator, margin in NETWORKS:
        config = recipe(name, margin=margin, operator=tanh if operator == "tanh-cos" else operator, **settings[margin])
        for column, path in columns.items():
            # Test accuracy is already in %.
            percent: dict[str, Any] = {"metric": ("evaluations", name, *path), "factor": 100.0, "evaluation": name}
            measured = {"metric": path} if path[0] == "results" else percent
            cells.append(Cell(f"{margin}, {operator}", column, config, **measured))
    return tuple(cells)


@register_evaluation("faces")
def faces_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns measures of verification for people who are not in the training set."""
    return evaluate_faces(model, data_dir, next(model.parameters()).device)


@register
def faces() -> Experiment:
    """SphereFace-20 trained on LFW's development split, and tested on other people."""
    cells = _cells("faces", FACES_COLUMNS, MARGINS, tanh=TANH)
    title = "Faces: SphereFace-20 trained on 1,184 people of LFW, tested on other people, in %"
    notes = (
        "accuracy and AUC: on the 1,000 pairs of pairsDevTest, with thresholds by ten-fold cross-validation; TAR: on "
        "all pairs of its images; ten folds: on those pairs of LFW's ten folds whose people are not in the training "
        "set.",
    )
    return Experiment("faces", title, cells, seeds=3, higher_is_better=True, notes=notes)


# These two train with their default scale of 30; with the 64 of the others, features collapse.
OPEN_SET_SETTINGS = {**MARGINS, "am-softmax": {}, "sphereface-r": {}}
OPEN_SET_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "known classes, accuracy": ("results", "test_accuracy"),
    "unseen pairs, AUC": ("verification", "auc"),
    "unseen pairs, accuracy": ("verification", "accuracy", "mean"),
    "unseen, rank 1": ("identification", "ranks", 0),
    "known or not, AUC": ("detection", "auc"),
}


@register_evaluation("open-set")
def open_set_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns measures of verification, identification and detection for the 20 held-out classes."""
    return evaluate_open_set(model, data_dir, next(model.parameters()).device)


@register
def open_set() -> Experiment:
    """CNN-9 trained on 80 classes of CIFAR-100, and tested on the other 20."""
    cells = _cells("open-set", OPEN_SET_COLUMNS, OPEN_SET_SETTINGS)
    title = "Open set: CNN-9 trained on 80 classes of CIFAR-100, tested on the other 20, in %"
    return Experiment("open_set", title, cells, seeds=3, higher_is_better=True)
