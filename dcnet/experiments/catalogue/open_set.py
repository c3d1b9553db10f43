"""Classes that were not trained on, by the loss: CIFAR-100 with 20 classes held back."""

from pathlib import Path
from typing import Any

from torch import nn

from dcnet.experiments.catalogue.faces import NETWORKS
from dcnet.experiments.evaluations import register as register_evaluation
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.training import recipe
from dcnet.verification import evaluate_open_set

# At its own scale of 64 features collapse.
SETTINGS: dict[str, dict[str, Any]] = {"arcface": {"margin_scale": 16.0, "annealing": "auto"}}
COLUMNS: dict[str, tuple[str | int, ...]] = {
    "known classes, accuracy": ("results", "test_accuracy"),
    "unseen pairs, AUC": ("evaluations", "open-set", "verification", "auc"),
    "unseen pairs, accuracy": ("evaluations", "open-set", "verification", "accuracy", "mean"),
    "unseen, rank 1": ("evaluations", "open-set", "identification", "ranks", 0),
    "known or not, AUC": ("evaluations", "open-set", "detection", "auc"),
}


@register_evaluation("open-set")
def open_set_of(model: nn.Module, record: dict[str, Any], runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """The 20 classes that were held back."""
    return evaluate_open_set(model, data_dir, next(model.parameters()).device)


@register
def open_set() -> Experiment:
    """CNN-9 on 80 classes of CIFAR-100."""
    cells = [
        Cell(
            row=f"{margin}, {operator}",
            column=column,
            config=recipe("open-set", margin=margin, operator=operator, **SETTINGS.get(margin, {})),
            metric=path,
            # Results are in % already.
            factor=1.0 if path[0] == "results" else 100.0,
            evaluation=None if path[0] == "results" else "open-set",
        )
        for operator, margin in NETWORKS
        for column, path in COLUMNS.items()
    ]
    title = "Open set: CNN-9 trained on 80 classes of CIFAR-100, tested with the other 20, in %"
    return Experiment("open_set", title, tuple(cells), seeds=3, higher_is_better=True)
