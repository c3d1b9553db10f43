"""Learning-rate schedules: stateless functions of the step and of the training losses so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dcnet.checks import check_number
from dcnet.registry import unknown_name


@dataclass(frozen=True)
class Constant:
    """A constant learning rate."""

    name: ClassVar[str] = "constant"

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        """Returns the factor of the learning rate at a step.

        Args:
            step: the step, counted from 0.
            total: number of steps of the run.
            losses: training losses of all evaluations so far.
        """
        return 1.0


@dataclass(frozen=True)
class Steps(Constant):
    """Multiplies the learning rate by `drop` at each milestone: a step, or a fraction of all steps if below 1."""

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
    """Cosine annealing of the factor from 1 to `floor`, after a linear warmup.

    The warmup is a number of steps, or a fraction of all steps if below 1.
    """

    name: ClassVar[str] = "cosine"
    warmup: float = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"the cosine schedule needs warmup >= 0 and a floor from 0 to 1, not {self.warmup} and {self.floor}"
            )

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        warmup = round(self.warmup * total) if self.warmup < 1 else self.warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = (step - warmup) / max(total - warmup, 1)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(done, 1))) / 2


@dataclass(frozen=True)
class Plateau(Constant):
    """Multiplies the learning rate by `drop` after `patience` evaluations in a row without a better training loss.

    A loss is better if it is below the best one by the fraction `better`.
    """

    name: ClassVar[str] = "plateau"
    drop: float = 0.1
    patience: int = 10
    better: float = 1e-3

    def __post_init__(self) -> None:
        check_number("drop", self.drop, above=0)
        if self.patience < 1:
            raise ValueError(f"patience must be 1 evaluation or more, not {self.patience}")

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
    """Reads the schedule of a saved config."""
    options = dict(described)
    name = options.pop("name")
    if name not in SCHEDULES:
        raise unknown_name("schedule", str(name), SCHEDULES)
    return SCHEDULES[name](**options)
