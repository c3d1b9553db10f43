"""Contests of networks that are trained on clean images and tested on others: corrupted ones, and other classes.

`sphere` does not see the length of a patch, so it is invariant to x -> a x, as long as ||x||^2 is far above the 1e-4
that is added to it. This is not a change of contrast: that scales pixels around the mean of each channel of an image,
while the network subtracts the same mean from all images. Brightness adds a constant. Both therefore change the angles
of patches. If the channels of each image are standardized, a network with any operator is invariant to both, except
where pixels were clamped to [0, 1]. What no normalization of whole images removes is uneven light, such as a shade. It
multiplies each patch by nearly one number, so that `sphere` hardly sees it if no mean is subtracted from the pixels.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.data.cifar import VALIDATION_10
from dcnet.experiments.catalogue.attack_tables import load_test_images
from dcnet.experiments.catalogue.contests import CROPS, make_config
from dcnet.experiments.contest import Candidate, Contest, Measure, Side, contest_experiment
from dcnet.experiments.experiment import Experiment, register, register_evaluation
from dcnet.models.blocks import Normalized
from dcnet.operator import PLAIN
from dcnet.robustness import accuracy, corruptions, uncertainty
from dcnet.training import Record, RunConfig

STEPS, PART = 6_000, 4
DATASET = "cifar10"
CORRUPTIONS, UNCERTAINTY = "corruptions", "uncertainty"
BATCH = 500
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
        "shade": mean_error(errors, ("shade",)),
        "all": mean_error(errors, tuple(errors)),
        "by_kind": errors,
    }


@register_evaluation(UNCERTAINTY, at_end=True)
def uncertainty_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """Returns calibration errors on the test images, and the errors of telling images of other classes by a score.

    An error of a score is 1 - AUROC, the probability that an image of another class has a higher score.
    """
    config, device = record.run_config(), next(model.parameters()).device
    images, labels = load_test_images(config, data_dir, device)
    logits, scores = _logits_and_scores(model, images)
    _, others = _logits_and_scores(model, _other_images(config, images, data_dir))
    return {
        "images": len(images),
        "calibration": uncertainty.calibration_error(logits, labels),
        "scaled_calibration": uncertainty.scaled_calibration_error(logits, labels),
        "temperature": uncertainty.best_temperature(logits, labels),
        "unknown": {name: 1 - uncertainty.auroc(scores[name], others[name]) for name in scores},
    }


def _other_images(config: RunConfig, images: Tensor, data_dir: Path | None) -> Tensor:
    """Returns test images of CIFAR-100, which has other classes; inverted images in a smoke test."""
    if config.dataset != DATASET:
        return 1 - images
    return load_test_images(dataclasses.replace(config, dataset="cifar100"), data_dir, images.device)[0]


@torch.no_grad()
def _logits_and_scores(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits, and by each score a number per image that should be lower for images of other classes."""
    assert isinstance(model, Normalized)
    features = torch.cat([model.features(part) for part in images.split(BATCH)])
    classifier = model.get_submodule("network.classifier")
    logits = classifier(features)
    cosines = F.linear(F.normalize(features), F.normalize(classifier.get_parameter("weight")))
    return logits, {
        "confidence": logits.double().softmax(1).amax(1),
        "norm": features.norm(dim=1),
        "angle": cosines.amax(1),
    }


def mean_error(errors: Mapping[str, list[float]], kinds: tuple[str, ...]) -> float:
    """Returns the mean error over all severities of these kinds of corruption."""
    return statistics.fmean(error for kind in kinds for error in errors[kind])


# The rates and the decay of each optimizer; every side tries all. The highest rates were added after the others, when
# nearly all sides had chosen the highest one that they had, and so was the second optimizer of a side.
RATES: dict[str, tuple[tuple[float, ...], float]] = {
    "SGD": ((0.025, 0.06, 0.15, 0.375), 1e-3),
    "Adam": ((8e-4, 2e-3, 5e-3, 0.0125), 5e-4),
}
LIT, IMAGE, CHANNEL, SCALE = (
    {"augmentation": LIT_CROPS},
    *({"standardize": kind} for kind in ("image", "channel", "scale")),
)
SIDES: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "plain, augmented": {"operator": PLAIN, **LIT},
    "plain, standardized": {"operator": PLAIN, **IMAGE},
    "plain, by channel": {"operator": PLAIN, **CHANNEL},
    "plain, scaled": {"operator": PLAIN, **SCALE},
    **{operator: {"operator": operator} for operator in ("linear-cos", "sphere-cos", "tanh-cos", "ball-cos")},
    "sphere-cos, augmented": {"operator": "sphere-cos", **LIT},
    "sphere-cos, by channel": {"operator": "sphere-cos", **CHANNEL},
    "sphere-cos, scaled": {"operator": "sphere-cos", **SCALE},
}
MEASURES = (
    Measure("contrast and brightness", ("evaluations", CORRUPTIONS, "light"), 100.0, CORRUPTIONS),
    Measure("shade", ("evaluations", CORRUPTIONS, "shade"), 100.0, CORRUPTIONS),
    Measure("all corruptions", ("evaluations", CORRUPTIONS, "all"), 100.0, CORRUPTIONS),
    Measure("clean"),
)
UNCERTAIN = (
    Measure("calibration", ("evaluations", UNCERTAINTY, "scaled_calibration"), 100.0, UNCERTAINTY),
    *(
        Measure(f"unknown ({score})", ("evaluations", UNCERTAINTY, "unknown", score), 100.0, UNCERTAINTY)
        for score in ("confidence", "norm", "angle")
    ),
)
UNCERTAIN_NOTES = (
    "The networks of `contest_corruptions`. Calibration: the expected calibration error after temperature scaling, the "
    "temperature of each half of the test images from the other half. Unknown: 1 - AUROC of telling test images of "
    "CIFAR-10 from those of CIFAR-100, by the largest probability, the norm of the features, and the smallest angle "
    "between features and the weights of a class.",
)


def _recipes() -> str:
    """Returns the tried recipes in words, for the notes."""
    tried = {name: (" ".join(f"{rate:g}" for rate in rates), decay) for name, (rates, decay) in RATES.items()}
    return " and ".join(f"{name} with rates {rates} and decay {decay:g}" for name, (rates, decay) in tried.items())


TRIALS = (
    f"Held-out error: {STEPS // PART:,} steps, measured on 5,000 clean training images that are held out; one seed, or "
    f"two for the best two recipes of a side. The other errors: the best recipe, {STEPS:,} steps, other seeds, all "
    "test images. Augmented: random contrast and brightness of training images. Standardized: mean 0 and deviation 1 "
    "of each image; by channel: of each of its channels; scaled: a mean square of 1, without subtracting a mean.",
    f"Each side tries the same recipes: {_recipes()}. Projection: filters of decoupled layers are set to norm 1 every "
    "100 steps.",
)
NOTES = (
    "Corruptions are those of `dcnet attack`; errors are means over all five severities. Shade is uneven "
    "light; all corruptions are these three, noise and blur.",
)


def _side(side: str, own: Mapping[str, Any]) -> Side:
    plain = own["operator"] == PLAIN
    settings = {"model": "cnn9-small", "dataset": DATASET, "steps": STEPS, **own}
    candidates = [
        Candidate(
            name if plain else f"{name}, projection",
            make_config({**settings, "optimizer": name.lower(), "lr": rate, "weight_decay": decay}),
        )
        for name, (rates, decay) in RATES.items()
        for rate in rates
    ]
    return Side(side, tuple(candidates), reference=plain)


def _contest(name: str, about: str, measures: tuple[Measure, ...], notes: tuple[str, ...]) -> Experiment:
    sides = tuple(_side(side, own) for side, own in SIDES.items())
    rules = Contest(sides, {"dataset": VALIDATION_10, "steps": STEPS // PART}, finalists=2, measures=measures)
    return contest_experiment(name, f"Contest, {about}: small CNN-9, CIFAR-10, error in %", rules, 3, (*TRIALS, *notes))


@register
def contest_corruptions() -> Experiment:
    """CNN-9 for attacks, trained on clean images and tested on corrupted ones."""
    return _contest("contest_corruptions", "corrupted test images", MEASURES, NOTES)


@register
def contest_uncertainty() -> Experiment:
    """The same networks: calibration, and images of other classes."""
    return _contest("contest_uncertainty", "calibration and images of other classes", UNCERTAIN, UNCERTAIN_NOTES)
