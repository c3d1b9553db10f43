"""Contests of plain and decoupled networks, in which each side uses the best of its own recipes.

`fair_trials` and `fair` are an early contest with two sides. The others follow `dcnet.experiments.contest`: trials with
a part of the steps on held-out training images, a second seed for the best four, and finals with three other seeds."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dcnet.data import Augmentation
from dcnet.data.cifar import VALIDATION
from dcnet.experiments.contest import Candidate, Contest, Side, contest_experiment
from dcnet.experiments.experiment import Cell, Experiment, experiments, register
from dcnet.operator import PLAIN
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
# What all recipes have in common.
COMMON: dict[str, Any] = {"schedule": Cosine(), "label_smoothing": 0.1, "augmentation": CROPS}


def tuned(side: str, trial: str, **changes: Any) -> RunConfig:
    """Returns the config of a side with the recipe of a trial.

    All have a cosine schedule, label smoothing, and the usual momentum of batch normalization.
    """
    common = {**COMMON, "model": "cnn9", "norm_momentum": 0.1}
    return recipe("paper-cifar", **{**common, **SIDES[side], **TRIALS[trial], **changes})


@register
def fair_trials() -> Experiment:
    """Six recipes for each side, compared on held-out training images."""
    cells = tuple(
        Cell(side, trial, tuned(side, trial, dataset=VALIDATION, steps=TRIAL_STEPS))
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


@dataclasses.dataclass(frozen=True)
class Family:
    """Recipes with one optimizer: three rates at the middle decay, and all decays at the middle rate."""

    name: str
    optimizer: Mapping[str, Any]
    rates: tuple[float, float, float]
    decays: tuple[float, float, float]

    def recipes(self) -> list[tuple[float, float]]:
        """Returns pairs of rate and decay, the middle of both first."""
        (low, middle, high), (weak, usual, strong) = self.rates, self.decays
        return [(middle, usual), (low, usual), (high, usual), (middle, weak), (middle, strong)]


# The decay of AdamW and Muon is decoupled, so it is larger than that of SGD for the same effect.
DECAYS = (0.02, 0.05, 0.1)
PLAIN_FAMILIES = (
    Family("SGD", {"optimizer": "sgd"}, (0.025, 0.05, 0.1), (5e-4, 1e-3, 2e-3)),
    Family("AdamW", {"optimizer": "adamw"}, (5e-4, 1e-3, 2e-3), DECAYS),
    Family("Muon", {"optimizer": "muon"}, (1e-3, 2e-3, 4e-3), DECAYS),
)
# Filters of unweighted layers have no decay, so the decay concerns the classifier, shortcuts and normalization.
# Filters of norm 1 turn by about six times the rate of Muon in a layer of 96 channels.
DECOUPLED_FAMILIES = (
    Family("Adam, projection", {"optimizer": "adam"}, (5e-4, 1e-3, 2e-3), (2e-4, 5e-4, 1e-3)),
    Family("Muon on the sphere", {"optimizer": "muon", "projection_every": 1}, (2e-3, 4e-3, 8e-3), DECAYS),
    Family("SGD on the sphere", {"optimizer": "sphere-sgd", "projection_every": 0}, (0.01, 0.02, 0.04), DECAYS),
)


def make_side(name: str, settings: Mapping[str, Any]) -> Side:
    """Returns a side with the recipes of its families; plain sides are references."""
    plain = settings["operator"] == PLAIN
    candidates = [
        Candidate(family.name, make_config({"lr": rate, "weight_decay": decay, **family.optimizer, **settings}))
        for family in (PLAIN_FAMILIES if plain else DECOUPLED_FAMILIES)
        for rate, decay in family.recipes()
    ]
    return Side(name, tuple(candidates), reference=plain)


def make_config(settings: Mapping[str, Any]) -> RunConfig:
    """Returns the config of a final run."""
    momentum = {"norm_momentum": 0.1} if settings.get("norm", "batch") == "batch" else {}
    return recipe("paper-cifar", **{**COMMON, **momentum, **settings})


# By row: a family, its decays and its rates; every pair of them is a recipe.
Ranges = Sequence[tuple[str, tuple[float, ...], tuple[float, ...]]]


def grid_side(name: str, ranges: Ranges, settings: Mapping[str, Any], make: Callable[..., RunConfig]) -> Side:
    """Returns a side whose recipes are all pairs of a decay and a rate; `make` turns settings into a config.

    Sides with the same ranges have the same recipes, plain or decoupled. Families have the names of their optimizers.
    """
    candidates = [
        Candidate(family, make(**{**settings, "optimizer": family.lower(), "lr": rate, "weight_decay": decay}))
        for family, decays, rates in ranges
        for decay in decays
        for rate in rates
    ]
    return Side(name, tuple(candidates), reference=settings["operator"] == PLAIN)


def make_contest(
    name: str, about: str, sides: Iterable[Side], steps: int, part: int = 4, finalists: int = 4
) -> Experiment:
    """Returns a contest on CIFAR-100 whose trials take 1 / `part` of the steps of the final runs."""
    trial = {"dataset": VALIDATION, "steps": steps // part}
    notes = (
        f"Held-out error: {steps // part:,} steps, measured on 5,000 training images that are held out; one seed, "
        f"or two for the best {finalists} recipes of a side. "
        f"Test error: the best recipe of a side, {steps:,} steps, other seeds.",
    )
    return contest_experiment(
        name, f"Contest, {about}: CIFAR-100, error in %", Contest(tuple(sides), trial, finalists), 3, notes
    )


# Families whose rates are compared, with five rates each.
TRANSFER: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "plain, SGD": ({"operator": PLAIN, "optimizer": "sgd", "weight_decay": 1e-3}, (0.0125, 0.025, 0.05, 0.1, 0.2)),
    "plain, Muon": ({"operator": PLAIN, "optimizer": "muon", "weight_decay": 0.05}, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
    "tanh-cos, Adam": ({"operator": "tanh-cos", "optimizer": "adam"}, (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)),
    "tanh-cos, SGD on the sphere": (
        {"operator": "tanh-cos", "optimizer": "sphere-sgd", "weight_decay": 0.05, "projection_every": 0},
        (0.005, 0.01, 0.02, 0.04, 0.08),
    ),
}
NETWORKS: dict[str, dict[str, Any]] = {
    **{f"CNN-9, width {width:g}": {"model": "cnn9", "width": width} for width in (0.5, 1.0, 2.0)},
    **{f"SphereFace-{depth}": {"model": f"sphereface{depth}", "norm": "batch"} for depth in (20, 36, 64)},
}


@register
def rate_transfer() -> Experiment:
    """Does one learning rate serve all widths and depths?"""
    cells = tuple(
        Cell(
            f"{family}, rate {rate:g}",
            column,
            make_config({**own, **network, "lr": rate, "dataset": VALIDATION, "steps": TRIAL_STEPS}),
        )
        for family, (own, rates) in TRANSFER.items()
        for rate in rates
        for column, network in NETWORKS.items()
    )
    title = f"Learning rates by width and depth: {TRIAL_STEPS:,} steps, error in % on 5,000 held-out training images"
    return Experiment("rate_transfer", title, cells)


OPERATORS = ("linear-cos", "seg-cos", "seg-linear", "seg-sqcos", "linear-sqcos", "tanh-cos")
NORMALIZED = ("linear-sqcos",)


def _network_sides(model: str) -> list[Side]:
    """Returns a plain side, one per operator, and some with the weight-normalized softmax."""
    settings: dict[str, Any] = {"model": model, "steps": STEPS}
    sides = {"plain": {"operator": PLAIN}} | {operator: {"operator": operator} for operator in OPERATORS}
    for operator in NORMALIZED:
        sides[f"{operator}, normalized classifier"] = {"operator": operator, "classifier": "normalized"}
    return [make_side(name, settings | own) for name, own in sides.items()]


@register
def contest_resnet32() -> Experiment:
    """ResNet-32: a plain network and decoupled ones."""
    return make_contest("contest_resnet32", "ResNet-32", _network_sides("resnet32"), STEPS)


@register
def contest_cnn9() -> Experiment:
    """CNN-9: a plain network, decoupled ones, and one without ReLU."""
    settings = {"model": "cnn9", "steps": STEPS, "operator": "seg-sqcos", "activation": "none"}
    free = make_side("seg-sqcos, no ReLU", settings)
    return make_contest("contest_cnn9", "CNN-9", [*_network_sides("cnn9"), free], STEPS)


# Steps by number of training images per class.
FEW_STEPS = {10: 4_000, 50: 10_000}
FEW_OPERATORS = ("linear-cos", "seg-cos", "tanh-cos")


def contest_few_images(per_class: int) -> Experiment:
    """ResNet-32 with few training images."""
    steps = FEW_STEPS[per_class]
    settings = {"model": "resnet32", "steps": steps, "train_images": 100 * per_class}
    sides = {"plain": PLAIN} | {name: name for name in FEW_OPERATORS}
    found = [make_side(name, {**settings, "operator": operator}) for name, operator in sides.items()]
    about = f"ResNet-32, {per_class} training images per class"
    return make_contest(f"contest_few_images_{per_class}", about, found, steps, part=2)


for count in FEW_STEPS:
    experiments.add(f"contest_few_images_{count}", partial(contest_few_images, count), module=__name__)
