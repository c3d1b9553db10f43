"""How the learning rate moves: a factor that depends on the step, and on the losses seen so far, and on nothing else.

A schedule has no state, so that a run that was interrupted goes on with the learning rate it would have had.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dcnet.learnable import check_number
from dcnet.spec import unknown


@dataclass(frozen=True)
class Constant:
    """The learning rate stays as it is."""

    name: ClassVar[str] = "constant"

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        """What the learning rate is multiplied by at a step of `total`, after epochs with these training losses."""
        return 1.0


@dataclass(frozen=True)
class Steps(Constant):
    """Multiplied by `drop` at each milestone: a step, or a share of all steps where it is below 1."""

    name: ClassVar[str] = "step"
    milestones: tuple[float, ...] = (0.5, 0.75)
    drop: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        check_number("drop", self.drop, above=0)
        for milestone in self.milestones:
            check_number("a milestone", milestone, above=0)

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        at = (milestone * total if milestone < 1 else milestone for milestone in self.milestones)
        return self.drop ** sum(step >= place for place in at)


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from 1 to `floor`, after a straight rise over the first `warmup` steps."""

    name: ClassVar[str] = "cosine"
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(f"a cosine needs warmup >= 0 and a floor from 0 to 1, not {self.warmup} and {self.floor}")

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(total - self.warmup, 1)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(done, 1))) / 2


@dataclass(frozen=True)
class Plateau(Constant):
    """Multiplied by `drop` each time the training loss of `patience` epochs in a row was no better than before.

    With `evaluate_every` it is as many evaluations, each with the loss since the one before.
    """

    name: ClassVar[str] = "plateau"
    drop: float = 0.1
    patience: int = 10
    better: float = 1e-3

    def __post_init__(self) -> None:
        check_number("drop", self.drop, above=0)
        if self.patience < 1:
            raise ValueError(f"patience must be 1 epoch or more, not {self.patience}")

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        factor, best, waited = 1.0, math.inf, 0
        for loss in losses:
            better = loss < best * (1 - self.better)
            best, waited = (loss, 0) if better else (best, waited + 1)
            if waited == self.patience:
                factor, waited = factor * self.drop, 0
        return factor


Schedule = Constant
SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in (Constant, Steps, Cosine, Plateau)}


def schedule_of(described: dict[str, Any]) -> Schedule:
    """The schedule that `described_schedule` wrote down."""
    options = dict(described)
    name = options.pop("name")
    if name not in SCHEDULES:
        raise unknown("schedule", str(name), SCHEDULES)
    return SCHEDULES[name](**options)
