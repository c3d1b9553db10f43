"""Adversarial training in one step without collapse: plain networks, N-FGSM, and decoupled networks on CIFAR-10."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.experiments.catalogue.attack_tables import accuracy_under, load_test_images
from dcnet.experiments.collapse import FGSM, LOW, PGD, SHARE
from dcnet.experiments.experiment import Cell, Experiment, experiments, register_evaluation
from dcnet.operator import PLAIN
from dcnet.robustness import accuracy
from dcnet.training import Record, RunConfig, recipe
from dcnet.training import adversarial as adversaries

NAME = "one-step"
EPSILON, PGD_STEPS = 8 / 255, 50
STEPS, SEEDS = 20_000, 8
# The attacked test images: the first ones.
IMAGES = 5_000
# Experiments by the share of adversarial images; without clean images, collapses are more frequent.
SHARES = {"contest_one_step": 1.0, "contest_one_step_mixed": 0.5}
SIDES: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "plain, no decay": {"operator": PLAIN, "weight_decay": 0.0},
    "plain, N-FGSM": {"operator": PLAIN, "adversary": str(adversaries.NFGSM(EPSILON))},
    "linear-cos": {"operator": "linear-cos"},
    "ball-cos": {"operator": "ball-cos"},
    "tanh-cos": {"operator": "tanh-cos"},
}


@register_evaluation(NAME)
def one_step_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns accuracies on the first test images: clean, under FGSM, and under PGD with many steps."""
    images, labels = load_test_images(record.run_config(), data_dir, next(model.parameters()).device)
    images, labels = images[:IMAGES], labels[:IMAGES]
    return {
        "epsilon": EPSILON,
        "images": len(images),
        "clean": accuracy(model, images, labels),
        "fgsm": accuracy_under(model, images, labels, "fgsm", EPSILON),
        "pgd": accuracy_under(model, images, labels, "pgd", EPSILON, steps=PGD_STEPS),
    }


def one_step_config(side: str, share: float) -> RunConfig:
    """Returns the config of a side: FGSM with this share of adversarial images, unless it has an adversary."""
    adversary = str(adversaries.FGSM(EPSILON, share=share))
    return recipe("paper-attack", **{"adversary": adversary, "steps": STEPS, **SIDES[side]})


def contest_one_step(name: str) -> Experiment:
    """One-step training of all sides."""
    share = SHARES[name]
    cells = []
    for side in SIDES:
        config = one_step_config(side, share)
        for column, measure in {"clean": "clean", FGSM: "fgsm", PGD: "pgd"}.items():
            metric = ("evaluations", NAME, measure)
            cells.append(Cell(side, column, config, metric=metric, factor=100.0, evaluation=NAME))
        cells.append(Cell(side, "training, s", config, metric=("timings", "step_ms"), factor=STEPS / 1000))
    about = "FGSM images alone" if share == 1 else "clean and FGSM images"
    title = f"Adversarial training in one step, {about}: CIFAR-10, epsilon {255 * EPSILON:g}/255, accuracy in %"
    notes = (
        f"CNN-9 for attacks, {STEPS:,} steps of 128, first {IMAGES:,} test images. A run has collapsed if its accuracy "
        f"under {PGD} is below {LOW:g} % and below {SHARE:g} times that under FGSM. N-FGSM trains without clean "
        "images. p-values are corrected by Holm's method.",
    )
    return Experiment(name, title, tuple(cells), seeds=SEEDS, higher_is_better=True, collapses=True, notes=notes)


for experiment in SHARES:
    experiments.add(experiment, partial(contest_one_step, experiment), module=__name__)
