"""The contest of networks that are trained on clean images and tested on corrupted ones.

`sphere` does not see the length of a patch, so it is invariant to x -> a x, but this is not a change of contrast: that
scales pixels around the mean of each channel of an image, while the network subtracts the same mean from all images.
Brightness adds a constant. Both therefore change the angles of patches. If the channels of each image are standardized,
a network with any operator is invariant to both, except where pixels were clamped to [0, 1].
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.data.cifar import VALIDATION_10
from dcnet.experiments.catalogue.attack_tables import load_test_images
from dcnet.experiments.catalogue.contests import CROPS, Family, make_config
from dcnet.experiments.contest import Candidate, Contest, Measure, Side, contest_experiment
from dcnet.experiments.experiment import Experiment, register, register_evaluation
from dcnet.operator import PLAIN
from dcnet.robustness import accuracy, corruptions
from dcnet.training import Record

STEPS, PART = 8_000, 4
CORRUPTIONS = "corruptions"
# The kinds that a change of light causes.
LIGHT = ("contrast", "brightness")
# The augmentation covers nearly all levels of these corruptions.
LIT_CROPS = dataclasses.replace(CROPS, brightness=0.3, contrast=0.85)


@register_evaluation(CORRUPTIONS, at_end=True)
def corruptions_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns the errors on clean test images, and on all of them at each severity of each corruption."""
    images, labels = load_test_images(record.run_config(), data_dir, next(model.parameters()).device)
    found = corruptions.accuracies(model, images, labels)
    errors = {kind: [1 - value for value in values] for kind, values in found.items()}
    return {
        "images": len(images),
        "clean": 1 - accuracy(model, images, labels),
        "light": mean_error(errors, LIGHT),
        "all": mean_error(errors, tuple(errors)),
        "by_kind": errors,
    }


def mean_error(errors: Mapping[str, list[float]], kinds: tuple[str, ...]) -> float:
    """Returns the mean error over all severities of these kinds of corruption."""
    return statistics.fmean(error for kind in kinds for error in errors[kind])


PLAIN_FAMILY = Family("SGD", {"optimizer": "sgd"}, (0.025, 0.06, 0.15), (1e-3, 1e-3, 1e-3))
OWN_FAMILY = Family("Adam, projection", {"optimizer": "adam"}, (8e-4, 2e-3, 5e-3), (5e-4, 5e-4, 5e-4))
LIT, IMAGE, CHANNEL = {"augmentation": LIT_CROPS}, {"standardize": "image"}, {"standardize": "channel"}
SIDES: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "plain, augmented": {"operator": PLAIN, **LIT},
    "plain, standardized": {"operator": PLAIN, **IMAGE},
    "plain, by channel": {"operator": PLAIN, **CHANNEL},
    **{operator: {"operator": operator} for operator in ("linear-cos", "sphere-cos", "tanh-cos", "ball-cos")},
    "sphere-cos, augmented": {"operator": "sphere-cos", **LIT},
    "sphere-cos, by channel": {"operator": "sphere-cos", **CHANNEL},
}
MEASURES = (
    Measure("contrast and brightness", ("evaluations", CORRUPTIONS, "light"), 100.0, CORRUPTIONS),
    Measure("all corruptions", ("evaluations", CORRUPTIONS, "all"), 100.0, CORRUPTIONS),
    Measure("clean"),
)
NOTES = (
    f"Held-out error: {STEPS // PART:,} steps, measured on 5,000 clean training images that are held out; one seed, or "
    f"two for the best two recipes of a side. The other errors: the best recipe, {STEPS:,} steps, other seeds, all "
    "test images. Corruptions are those of `dcnet attack`; errors are means over all five severities, contrast and "
    "brightness for the first, and also noise and blur for the second. Augmented: random contrast and brightness of "
    "training images. Standardized: mean 0 and deviation 1 of each image; by channel: of each of its channels.",
)


def _side(name: str, own: Mapping[str, Any]) -> Side:
    plain = own["operator"] == PLAIN
    family = PLAIN_FAMILY if plain else OWN_FAMILY
    settings = {"model": "cnn9-small", "dataset": "cifar10", "steps": STEPS, **family.optimizer, **own}
    candidates = [
        Candidate(family.name, make_config({**settings, "lr": rate, "weight_decay": decay}))
        for rate, decay in family.recipes(128, sweep_decays=False)
    ]
    return Side(name, tuple(candidates), reference=plain)


@register
def contest_corruptions() -> Experiment:
    """CNN-9 for attacks, trained on clean images and tested on corrupted ones."""
    sides = tuple(_side(name, own) for name, own in SIDES.items())
    rules = Contest(sides, {"dataset": VALIDATION_10, "steps": STEPS // PART}, finalists=2, measures=MEASURES)
    title = "Contest: corrupted test images, small CNN-9, CIFAR-10, error in %"
    return contest_experiment("contest_corruptions", title, rules, 3, NOTES)
