"""Contests on the embedded digits, without a GPU: batches of two images, and few images per class."""

from collections.abc import Sequence
from typing import Any

from dcnet.data import Augmentation
from dcnet.data.mnist import DIGITS_VALIDATION, HELD_OUT_PER_CLASS, TRAINING_IMAGES
from dcnet.experiments.catalogue.contests import Ranges, grid_side
from dcnet.experiments.contest import Contest, Side, contest_experiment
from dcnet.experiments.experiment import Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import RunConfig, recipe

FINALISTS = 3
BATCH, BATCH_STEPS = 2, 2_400
BATCH_RANGES: Ranges = (
    ("Adam", (0,), (1e-4, 3e-4, 1e-3, 3e-3)),
    ("AdamW", (1,), (3e-4, 1e-3, 3e-3)),
    ("SGD", (0,), (2.5e-4, 1e-3, 4e-3, 0.016, 0.064)),
    ("SGD", (0.01,), (1e-3, 4e-3, 0.016)),
)
BN, GN, NO_NORM = {"norm": "batch"}, {"norm": "group"}, {"norm": "none"}
# With a momentum of 0.01, the running statistics cover about a hundred batches, with the default of 0.1 about ten.
SLOW_BN = {"norm": "batch", "norm_momentum": 0.01}
# In other networks, the fully connected layer has the statistics of the two samples of a batch alone.
CONV_BN = {"model": "cnn9-small-bare", "norm": "batch"}
BATCH_SIDES: dict[str, dict[str, Any]] = {
    "plain, BN": {"operator": PLAIN, **BN},
    "plain, BN, momentum 0.01": {"operator": PLAIN, **SLOW_BN},
    "plain, BN in convolutions": {"operator": PLAIN, **CONV_BN},
    "plain, GN": {"operator": PLAIN, **GN},
    "plain, no norm": {"operator": PLAIN, **NO_NORM},
    "linear-cos, BN": {"operator": "linear-cos", **BN},
    "linear-cos, GN": {"operator": "linear-cos", **GN},
    "tanh-cos, BN": {"operator": "tanh-cos", **BN},
    "tanh-cos, BN in convolutions": {"operator": "tanh-cos", **CONV_BN},
    "tanh-cos, GN": {"operator": "tanh-cos", **GN},
    "tanh-cos, no norm": {"operator": "tanh-cos", **NO_NORM},
    "sphere-cos, no norm": {"operator": "sphere-cos", **NO_NORM},
}
# Images per class, and the steps of a run.
FEW, FEW_STEPS = 5, 600
FEW_SIDES = {"plain": PLAIN} | {name: name for name in ("linear-cos", "seg-cos", "tanh-cos", "sphere-cos")}
FEW_RANGES: Ranges = (
    ("Adam", (0,), (1e-4, 3e-4, 1e-3, 3e-3, 0.01)),
    ("AdamW", (0.1, 1, 10), (1e-3, 3e-3, 0.01)),
    ("SGD", (0, 1e-3, 0.01), (1e-3, 4e-3, 0.016, 0.064, 0.256)),
)
SHIFTS = Augmentation(pad=1)


def _config(**settings: Any) -> RunConfig:
    return recipe("digits", width=0.5, **settings)


def _contest(name: str, about: str, sides: Sequence[Side], seeds: int) -> Experiment:
    """Returns a contest of small CNN-9 of half the width."""
    rules = Contest(tuple(sides), {"dataset": DIGITS_VALIDATION}, FINALISTS)
    notes = (
        f"Held-out error: measured on {10 * HELD_OUT_PER_CLASS} of the {TRAINING_IMAGES} training images; one seed, or "
        f"two for the best {FINALISTS} recipes of a side. Test error: the best recipe, as many steps, other seeds.",
    )
    title = f"Contest, {about}: small CNN-9 of half the width, digits, error in %"
    return contest_experiment(name, title, rules, seeds, notes)


@register
def contest_digits_batch_2() -> Experiment:
    """Batches of two images: batch normalization, group normalization, and none."""
    common = {"batch_size": BATCH, "steps": BATCH_STEPS, "evaluate_every": BATCH_STEPS}
    sides = [grid_side(name, BATCH_RANGES, {**common, **own}, _config) for name, own in BATCH_SIDES.items()]
    return _contest("contest_digits_batch_2", f"batches of {BATCH}", sides, seeds=5)


@register
def contest_digits_few() -> Experiment:
    """Five training images per class, which the seed draws; they are shifted at random."""
    common = {"train_images": 10 * FEW, "batch_size": 25, "steps": FEW_STEPS, "evaluate_every": FEW_STEPS}
    settings = {**common, "augmentation": SHIFTS}
    sides = [
        grid_side(name, FEW_RANGES, {**settings, "operator": operator}, _config) for name, operator in FEW_SIDES.items()
    ]
    return _contest("contest_digits_few", f"{FEW} training images per class", sides, seeds=10)
