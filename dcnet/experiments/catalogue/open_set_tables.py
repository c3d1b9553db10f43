"""The claim of SphereFace: verification of unseen people (LFW) and unseen classes (CIFAR-100), by loss."""

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
# Paths of the measures in the evaluation "faces".
FACES_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "accuracy": ("development", "accuracy", "mean"),
    "AUC": ("development", "auc"),
    "TAR at FAR 1 %": ("development_all", "tar_at_far", 1, "tar"),
    "TAR at FAR 0.1 %": ("development_all", "tar_at_far", 2, "tar"),
    "TAR at FAR 0.01 %": ("development_all", "tar_at_far", 3, "tar"),
    "ten folds, balanced": ("unseen", "balanced_accuracy", "mean"),
    "ten folds, AUC": ("unseen", "auc"),
}


@register_evaluation("faces")
def faces_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns measures of verification for people who are not in the training set."""
    return evaluate_faces(model, data_dir, next(model.parameters()).device)


@register
def faces() -> Experiment:
    """SphereFace-20 trained on LFW's development split, and tested on other people."""
    cells = [
        Cell(
            row=f"{margin}, {operator}",
            column=column,
            config=recipe(
                "faces", margin=margin, operator=TANH if operator == "tanh-cos" else operator, **MARGINS[margin]
            ),
            metric=("evaluations", "faces", *path),
            factor=100.0,
            evaluation="faces",
        )
        for operator, margin in NETWORKS
        for column, path in FACES_COLUMNS.items()
    ]
    title = "Faces: SphereFace-20 trained on 1,184 people of LFW, tested on other people, in %"
    notes = (
        "accuracy and AUC: on the 1,000 pairs of pairsDevTest, with thresholds by ten-fold cross-validation; TAR: on "
        "all pairs of its images; ten folds: on those pairs of LFW's ten folds whose people are not in the training "
        "set.",
    )
    return Experiment("faces", title, tuple(cells), seeds=3, higher_is_better=True, notes=notes)


# These two train with their default scale of 30; with the 64 of the others, features collapse.
OPEN_SET_SETTINGS = {**MARGINS, "am-softmax": {}, "sphereface-r": {}}
OPEN_SET_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "known classes, accuracy": ("results", "test_accuracy"),
    "unseen pairs, AUC": ("evaluations", "open-set", "verification", "auc"),
    "unseen pairs, accuracy": ("evaluations", "open-set", "verification", "accuracy", "mean"),
    "unseen, rank 1": ("evaluations", "open-set", "identification", "ranks", 0),
    "known or not, AUC": ("evaluations", "open-set", "detection", "auc"),
}


@register_evaluation("open-set")
def open_set_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns measures of verification, identification and detection for the 20 held-out classes."""
    return evaluate_open_set(model, data_dir, next(model.parameters()).device)


@register
def open_set() -> Experiment:
    """CNN-9 trained on 80 classes of CIFAR-100, and tested on the other 20."""
    cells = [
        Cell(
            row=f"{margin}, {operator}",
            column=column,
            config=recipe("open-set", margin=margin, operator=operator, **OPEN_SET_SETTINGS[margin]),
            metric=path,
            # Test accuracy is already in %.
            factor=1.0 if path[0] == "results" else 100.0,
            evaluation=None if path[0] == "results" else "open-set",
        )
        for operator, margin in NETWORKS
        for column, path in OPEN_SET_COLUMNS.items()
    ]
    title = "Open set: CNN-9 trained on 80 classes of CIFAR-100, tested on the other 20, in %"
    return Experiment("open_set", title, tuple(cells), seeds=3, higher_is_better=True)
