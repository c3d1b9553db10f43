"""Time to accuracy on CIFAR-100: ResNet-32 to 79 %, and a small network to 75 %, plain and decoupled.

`speedrun_trials` compares recipes on held-out training images, and `speedrun` runs the best ones on the test set."""

import math
from collections.abc import Mapping
from typing import Any

from dcnet.data.cifar import VALIDATION
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import RunConfig, recipe
from dcnet.training.config import OF_FILTERS

ACCURACY, SECONDS = "accuracy, %", "training, s"
SIDES = {"plain": PLAIN, "tanh-cos": "tanh-cos", "linear-cos": "linear-cos"}
# By network: its recipe, and the accuracy to reach in %.
NETWORKS = {"ResNet-32": ("speedrun", 79.0), "speednet": ("speedrun-small", 75.0)}
SEEDS = 10
NOTE = (
    "Training: the mean time of a step times the number of steps. Compilation, the capture of graphs and the only "
    "evaluation, after the last step, are not counted. There is no augmentation at test time."
)
Trials = Mapping[str, Mapping[str, Any]]

# Rates of Muon by network and side, the middle one for all other trials of Muon. Without projection, plain filters grow
# to norms at which they need larger rates.
RATES: dict[str, dict[str, tuple[float, float, float]]] = {
    "ResNet-32": {"plain": (8e-3, 0.016, 0.032), "tanh-cos": (5e-3, 0.01, 0.02)},
    "speednet": {"plain": (0.025, 0.05, 0.1), "tanh-cos": (0.015, 0.03, 0.06)},
}
# The rate of AdamW, for parameters that are no filters.
ADAMW = 2e-3
# Changes to the recipes, for both sides.
SHARED: dict[str, Trials] = {
    "ResNet-32": {
        "batches of 1,024": {"batch_size": 1_024, "steps": 1_800},
        "24 pixels up to 60 %": {"progressive_sizes": "24:0.6", "steps": 2_800},
        "momentum 0.95": {"momentum": 0.95},
    },
    "speednet": {
        "batches of 512": {"batch_size": 512, "steps": 1_760},
        "GELU": {"activation": "gelu"},
        "600 steps": {"steps": 600},
        "24 pixels up to 60 %": {"progressive_sizes": "24:0.6"},
        "AdamW 0.005": {"adamw": 5e-3},
    },
}
# The decay of decoupled networks concerns only the classifier, shortcuts and batch normalization, so it is not varied.
OWN: dict[str, dict[str, Trials]] = {
    "ResNet-32": {
        "plain": {
            "SGD 0.2": {"optimizer": "sgd", "lr": 0.2, "weight_decay": 1e-3},
            "decay 0.2": {"weight_decay": 0.2},
        },
        "tanh-cos": {
            "Adam 0.002": {"optimizer": "adam", "lr": 2e-3, "weight_decay": 5e-4},
            "SGD on the sphere 0.04": {"optimizer": "sphere-sgd", "lr": 0.04, "projection_every": 0},
        },
    },
    "speednet": {
        "plain": {"SGD 0.4": {"optimizer": "sgd", "lr": 0.4, "weight_decay": 1e-3}},
        "tanh-cos": {"SGD on the sphere 0.08": {"optimizer": "sphere-sgd", "lr": 0.08, "projection_every": 0}},
    },
}
# The chosen trials by network; linear-cos has that of tanh-cos.
CHOSEN = {
    "ResNet-32": {"plain": "Muon 0.016", "tanh-cos": "Muon 0.01"},
    "speednet": {"plain": "Muon 0.05", "tanh-cos": "Muon 0.03"},
}


def trials_of(network: str, side: str) -> Trials:
    """Returns the changes to the recipe of a network in the trials of a side, the middle rate first."""
    low, middle, high = RATES[network][side]
    rates = {f"Muon {rate:g}": {"lr": rate} for rate in (middle, low, high)}
    return {**rates, **SHARED[network], **OWN[network][side]}


def speedrun_config(network: str, side: str, trial: str, **changes: Any) -> RunConfig:
    """Returns the config of a trial, which is evaluated only after its last step."""
    tried = "plain" if side == "plain" else "tanh-cos"
    base, own = recipe(NETWORKS[network][0]), dict(trials_of(network, tried)[trial])
    adamw = own.pop("adamw", ADAMW)
    # The rate of Muon grows like the root of the batch size.
    scale = math.sqrt(own.get("batch_size", base.batch_size) / base.batch_size)
    rate = own.setdefault("lr", _rounded(scale * RATES[network][tried][1]))
    if own.get("optimizer", base.optimizer) in OF_FILTERS:
        own["other_rate"] = _rounded(adamw / rate)
    own["evaluate_every"] = own.get("steps", base.steps)
    return recipe(base.recipe, operator=SIDES[side], **{**own, **changes})


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _cells(row: str, config: RunConfig, target: float) -> tuple[Cell, Cell]:
    """Returns the cells with the accuracy, and with the seconds of training."""
    seconds = (config.steps or 0) / 1000
    return (
        Cell(row, ACCURACY, config, metric=("results", "test_accuracy"), target=target),
        Cell(row, SECONDS, config, metric=("timings", "step_ms"), factor=seconds),
    )


@register
def speedrun_trials() -> Experiment:
    """Recipes of both sides, compared on held-out training images."""
    cells = tuple(
        cell
        for network, (_, target) in NETWORKS.items()
        for side in CHOSEN[network]
        for trial in trials_of(network, side)
        for cell in _cells(
            f"{network}, {side}, {trial}", speedrun_config(network, side, trial, dataset=VALIDATION), target
        )
    )
    title = "Recipes for fast training: accuracy in % on 5,000 held-out training images of CIFAR-100, and seconds"
    return Experiment("speedrun_trials", title, cells, higher_is_better=True, notes=(NOTE,))


@register
def speedrun() -> Experiment:
    """The chosen recipes on the test set."""
    cells = tuple(
        cell
        for network, (_, target) in NETWORKS.items()
        for side in SIDES
        for cell in _cells(
            f"{network}, {side}",
            speedrun_config(network, side, CHOSEN[network].get(side, CHOSEN[network]["tanh-cos"])),
            target,
        )
    )
    title = "Time to accuracy: test accuracy in % on CIFAR-100, and seconds of training"
    return Experiment("speedrun", title, cells, seeds=SEEDS, higher_is_better=True, notes=(NOTE,))
