"""A fair comparison of plain and decoupled networks, each with its own recipe.

`fair_trials` compares recipes in short runs by the error on held-out training images. `fair` trains each side with its
best recipe in full length."""

import dataclasses
from typing import Any

from dcnet.data import Augmentation
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.training import RunConfig, recipe
from dcnet.training.schedules import Cosine

TRIAL_STEPS, STEPS = 10_000, 42_500
SIDES = {"plain, ReLU": {"operator": "conv"}, "seg-sqcos, no ReLU": {"operator": "seg-sqcos", "activation": "none"}}
CROPS = Augmentation(pad=4, pad_mode="symmetric", flip=True)
CUTOUT = dataclasses.replace(CROPS, cutout=8)
TRIALS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 5e-4},
    "AdamW": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05},
    "AdamW, cutout": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "augmentation": CUTOUT},
    "SGD": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4},
    "SGD, decay 1e-3": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 1e-3},
    "SGD, cutout": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4, "augmentation": CUTOUT},
}
# The best recipes in `fair_trials`.
BEST_TRIALS = {"plain, ReLU": "SGD, decay 1e-3", "seg-sqcos, no ReLU": "Adam"}


def tuned(side: str, trial: str, **changes: Any) -> RunConfig:
    """Returns the config of a side with the recipe of a trial.

    All have a cosine schedule, label smoothing, and the usual momentum of batch normalization.
    """
    common: dict[str, Any] = {
        "model": "cnn9",
        "schedule": Cosine(),
        "label_smoothing": 0.1,
        "norm_momentum": 0.1,
        "augmentation": CROPS,
    }
    return recipe("paper-cifar", **{**common, **SIDES[side], **TRIALS[trial], **changes})


@register
def fair_trials() -> Experiment:
    """Six recipes for each side, compared on held-out training images."""
    cells = tuple(
        Cell(side, trial, tuned(side, trial, dataset="cifar100-validation", steps=TRIAL_STEPS))
        for side in SIDES
        for trial in TRIALS
    )
    title = f"Choice of recipes: CNN-9, {TRIAL_STEPS:,} steps, error in % on 5,000 held-out training images"
    return Experiment("fair_trials", title, cells)


@register
def fair() -> Experiment:
    """Both sides, each with its best recipe."""
    cells = tuple(
        Cell(side, trial, tuned(side, trial, dataset="cifar100", steps=STEPS)) for side, trial in BEST_TRIALS.items()
    )
    title = f"Each network with its own recipe: CNN-9, CIFAR-100, {STEPS:,} steps, test error in %"
    return Experiment("fair", title, cells, seeds=3, contest=True)
