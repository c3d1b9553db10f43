"""Contests on the embedded digits, without a GPU: batches of two images, and few images per class."""

from collections.abc import Mapping
from typing import Any

from dcnet.data import Augmentation
from dcnet.data.mnist import DIGITS_VALIDATION, HELD_OUT_PER_CLASS, TRAINING_IMAGES
from dcnet.experiments.contest import Candidate, Contest, Side, contest_experiment
from dcnet.experiments.experiment import Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

# The rates of each optimizer; every side tries all of them.
RATES: dict[str, tuple[float, ...]] = {"Adam": (1e-4, 3e-4, 1e-3, 3e-3), "SGD": (1e-3, 4e-3, 0.016, 0.064)}
FINALISTS, SEEDS = 3, 5
BATCH, BATCH_STEPS = 2, 2_400
BN, GN, NO_NORM = {"norm": "batch"}, {"norm": "group"}, {"norm": "none"}
# With a momentum of 0.01, the running statistics cover about a hundred batches, with the default of 0.1 about ten.
SLOW_BN = {"norm": "batch", "norm_momentum": 0.01}
BATCH_SIDES: dict[str, dict[str, Any]] = {
    "plain, BN": {"operator": PLAIN, **BN},
    "plain, BN, momentum 0.01": {"operator": PLAIN, **SLOW_BN},
    "plain, GN": {"operator": PLAIN, **GN},
    "plain, no norm": {"operator": PLAIN, **NO_NORM},
    "linear-cos, BN": {"operator": "linear-cos", **BN},
    "linear-cos, GN": {"operator": "linear-cos", **GN},
    "tanh-cos, BN": {"operator": "tanh-cos", **BN},
    "tanh-cos, GN": {"operator": "tanh-cos", **GN},
    "tanh-cos, no norm": {"operator": "tanh-cos", **NO_NORM},
    "sphere-cos, no norm": {"operator": "sphere-cos", **NO_NORM},
}
# Images per class, and the steps of a run.
FEW, FEW_STEPS = 5, 600
FEW_SIDES = {"plain": PLAIN} | {name: name for name in ("linear-cos", "seg-cos", "tanh-cos", "sphere-cos")}
SHIFTS = Augmentation(pad=1)


def _side(name: str, own: Mapping[str, Any]) -> Side:
    """Returns a side; `own` has the settings of its network and of its runs."""
    candidates = [
        Candidate(optimizer, recipe("digits", width=0.5, optimizer=optimizer.lower(), lr=rate, **own))
        for optimizer, rates in RATES.items()
        for rate in rates
    ]
    return Side(name, tuple(candidates), reference=own["operator"] == PLAIN)


def _contest(name: str, about: str, sides: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any]) -> Experiment:
    """Returns a contest of small CNN-9 of half the width."""
    found = tuple(_side(side, {**common, **own}) for side, own in sides.items())
    rules = Contest(found, {"dataset": DIGITS_VALIDATION}, FINALISTS)
    notes = (
        f"Held-out error: measured on {10 * HELD_OUT_PER_CLASS} of the {TRAINING_IMAGES} training images; one seed, or "
        f"two for the best {FINALISTS} recipes of a side. Test error: the best recipe, as many steps, other seeds.",
    )
    title = f"Contest, {about}: small CNN-9 of half the width, digits, error in %"
    return contest_experiment(name, title, rules, SEEDS, notes)


@register
def contest_digits_batch_2() -> Experiment:
    """Batches of two images: batch normalization, group normalization, and none."""
    common = {"batch_size": BATCH, "steps": BATCH_STEPS, "evaluate_every": BATCH_STEPS}
    return _contest("contest_digits_batch_2", f"batches of {BATCH}", BATCH_SIDES, common)


@register
def contest_digits_few() -> Experiment:
    """Five training images per class, shifted at random."""
    sides = {name: {"operator": operator} for name, operator in FEW_SIDES.items()}
    common = {"train_images": 10 * FEW, "batch_size": 25, "steps": FEW_STEPS, "evaluate_every": FEW_STEPS}
    about = f"{FEW} training images per class"
    return _contest("contest_digits_few", about, sides, {**common, "augmentation": SHIFTS})
