"""People who were not trained on, by the loss: the claim of SphereFace, on LFW."""

from pathlib import Path
from typing import Any

from torch import nn

from dcnet.experiments.evaluations import register as register_evaluation
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.training import recipe
from dcnet.verification import evaluate_faces

# With the scales that training needs on few images of each of many people: of larger ones features collapse.
MARGINS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "m-softmax": {},
    "a-softmax": {},
    "am-softmax": {"margin_scale": 16.0},
    "arcface": {"margin_scale": 16.0, "annealing": "auto"},
    "sphereface-r": {"margin_scale": 16.0},
}
# A mean norm that keeps up with runs as short as these.
TANH = "tanh(radius=Radius(decay=0.99))-cos"
# The losses that a decoupled network is trained with, too.
DECOUPLED = ("softmax", "a-softmax")
NETWORKS = [("conv", margin) for margin in MARGINS] + [("tanh-cos", margin) for margin in DECOUPLED]
# Where the measures are, of 0.1 % the third of the rates.
COLUMNS: dict[str, tuple[str | int, ...]] = {
    "accuracy": ("development", "accuracy", "mean"),
    "AUC": ("development", "auc"),
    "TAR at FAR 1 %": ("development_all", "tar_at_far", 1, "tar"),
    "TAR at FAR 0.1 %": ("development_all", "tar_at_far", 2, "tar"),
    "ten folds, balanced": ("unseen", "balanced_accuracy", "mean"),
    "ten folds, AUC": ("unseen", "auc"),
}


@register_evaluation("faces")
def faces_of(model: nn.Module, record: dict[str, Any], runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Pairs of people who were not trained on."""
    return evaluate_faces(model, data_dir, next(model.parameters()).device)


@register
def faces() -> Experiment:
    """SphereFace-20 on LFW's development split, people disjoint."""
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
        for column, path in COLUMNS.items()
    ]
    title = "Faces: SphereFace-20 trained on 1,184 people of LFW, tested with others, in %"
    notes = (
        "accuracy and AUC: the 1,000 pairs of pairsDevTest, the threshold from nine of ten folds; TAR: all pairs of "
        "its images; ten folds: those pairs of LFW's ten folds that have nobody trained on.",
    )
    return Experiment("faces", title, tuple(cells), seeds=3, higher_is_better=True, notes=notes)
