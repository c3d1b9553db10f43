"""Contests in small batches: with batch statistics, with group normalization, and without normalization."""

import math
from functools import partial
from typing import Any

from dcnet.experiments.catalogue.contests import COMMON, Ranges, grid_side, make_contest
from dcnet.experiments.experiment import Experiment, experiments
from dcnet.operator import PLAIN
from dcnet.training import RunConfig, recipe

# Steps by batch size; with 80,000 steps, an image is seen 3 times at a batch size of 2.
STEPS = {2: 80_000, 4: 80_000, 8: 80_000, 128: 10_000}
FINALISTS = 3
BN, GN, NO_NORM = {"norm": "batch", "norm_momentum": 0.1}, {"norm": "group"}, {"norm": "none"}
# With a momentum of 0.001, the running statistics cover about a thousand batches, with the default of 0.1 about ten.
SLOW_BN = {"norm": "batch", "norm_momentum": 0.001}
# In the other networks, the fully connected layer has the statistics of the samples of a batch alone.
CONV_BN = {"model": "cnn9-bare", **BN}
SIDES: dict[str, dict[str, Any]] = {
    "plain, BN": {"operator": PLAIN, **BN},
    "plain, BN, momentum 0.001": {"operator": PLAIN, **SLOW_BN},
    "plain, BN in convolutions": {"operator": PLAIN, **CONV_BN},
    "plain, GN": {"operator": PLAIN, **GN},
    "plain, no norm": {"operator": PLAIN, **NO_NORM},
    "linear-cos, BN": {"operator": "linear-cos", **BN},
    "linear-cos, BN, momentum 0.001": {"operator": "linear-cos", **SLOW_BN},
    "linear-cos, GN": {"operator": "linear-cos", **GN},
    "tanh-cos, BN": {"operator": "tanh-cos", **BN},
    "tanh-cos, BN, momentum 0.001": {"operator": "tanh-cos", **SLOW_BN},
    "tanh-cos, BN in convolutions": {"operator": "tanh-cos", **CONV_BN},
    "tanh-cos, GN": {"operator": "tanh-cos", **GN},
    "tanh-cos, no norm": {"operator": "tanh-cos", **NO_NORM},
    "sphere-cos, no norm": {"operator": "sphere-cos", **NO_NORM},
}


def ranges(batch_size: int) -> Ranges:
    """Returns the recipes of all sides; the rates grow with the batch, those of Adam and AdamW with its square root."""
    scale, adam = batch_size / 2, math.sqrt(batch_size / 2)
    return (
        ("Adam", (0,), _times(adam, (3e-5, 1e-4, 3e-4))),
        ("AdamW", (0.1,), _times(adam, (3e-5, 1e-4, 3e-4, 1e-3))),
        ("SGD", (0,), _times(scale, (1e-3,))),
        ("SGD", (5e-4,), _times(scale, (2.5e-4, 1e-3, 4e-3, 0.016))),
    )


def _times(factor: float, rates: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(float(f"{factor * rate:.3g}") for rate in rates)


def _config(**settings: Any) -> RunConfig:
    """Returns a config without weight projection and constraint, which plain networks would not have either."""
    return recipe("paper-cifar", **{**COMMON, "model": "cnn9", "projection_every": 0, "orthonormal": 0.0, **settings})


def contest_small_batch(batch_size: int) -> Experiment:
    """CNN-9 in small batches: plain and decoupled networks, all with the same recipes."""
    steps, tried = STEPS[batch_size], ranges(batch_size)
    common = {"batch_size": batch_size, "steps": steps, "evaluate_every": steps}
    sides = [grid_side(name, tried, {**common, **own}, _config) for name, own in SIDES.items()]
    about = f"CNN-9 in batches of {batch_size}, by normalization"
    return make_contest(f"contest_small_batch_{batch_size}", about, sides, steps, finalists=FINALISTS)


for count in STEPS:
    experiments.add(f"contest_small_batch_{count}", partial(contest_small_batch, count), module=__name__)
