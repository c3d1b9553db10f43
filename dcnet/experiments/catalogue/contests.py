"""Plain and decoupled, each with its own recipe: does decoupling win against a well-trained network?

`fair_trials` compares recipes by short runs, on training images that are held out; `fair` runs the best of each side in
full."""

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
# The best of `fair_trials`.
BEST_TRIALS = {"plain, ReLU": "SGD, decay 1e-3", "seg-sqcos, no ReLU": "Adam"}


def tuned(side: str, trial: str, **changes: Any) -> RunConfig:
    """A side with a recipe: all have a cosine schedule, label smoothing, and fast batch normalization statistics."""
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
    """Six recipes for each side, by held-out training images."""
    cells = tuple(
        Cell(side, trial, tuned(side, trial, dataset="cifar100-validation", steps=TRIAL_STEPS))
        for side in SIDES
        for trial in TRIALS
    )
    title = f"Recipes tried: CNN-9, {TRIAL_STEPS:,} steps, error on 5,000 held-out training images in %"
    return Experiment("fair_trials", title, cells)


@register
def fair() -> Experiment:
    """Both sides with the best of their recipes."""
    cells = tuple(
        Cell(side, trial, tuned(side, trial, dataset="cifar100", steps=STEPS)) for side, trial in BEST_TRIALS.items()
    )
    title = f"Each with its own recipe: CNN-9, CIFAR-100, {STEPS:,} steps, test error in %"
    return Experiment("fair", title, cells, seeds=3, contest=True)
