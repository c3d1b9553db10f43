"""Schedules: learning rates and image sizes as functions of the step and of the training losses so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dcnet.checks import check_number, check_whole
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
                f"the {self.name} schedule needs warmup >= 0 and a floor from 0 to 1, not {self.warmup} and "
                f"{self.floor}"
            )

    def factor(self, step: int, total: int, losses: Sequence[float]) -> float:
        warmup = round(self.warmup * total) if self.warmup < 1 else self.warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = (step - warmup) / max(total - warmup, 1)
        return self.floor + (1 - self.floor) * self.decay(min(done, 1.0))

    def decay(self, done: float) -> float:
        """Returns the share that is left, from 1 to 0, after the fraction `done` of the steps after the warmup."""
        return (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Linear(Cosine):
    """A linear decrease of the factor from 1 to `floor`, after a linear warmup, as for `Cosine`."""

    name: ClassVar[str] = "linear"
    warmup: float = 0.2

    def decay(self, done: float) -> float:
        return 1 - done


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
SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in (Constant, Steps, Cosine, Linear, Plateau)}


def schedule_of(described: dict[str, Any]) -> Schedule:
    """Reads the schedule of a saved config."""
    options = dict(described)
    name = options.pop("name")
    if name not in SCHEDULES:
        raise unknown_name("schedule", str(name), SCHEDULES)
    return SCHEDULES[name](**options)


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of training images: each smaller size until a fraction of all steps, and then the full size.

    Args:
        stages: pairs of a size and the fraction of all steps at which it ends, in the order of the steps.
    """

    stages: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        before = 0.0
        for size, end in self.stages:
            check_whole("a progressive size", size, 1)
            if not before < end < 1:
                raise ValueError(f"progressive sizes must end at increasing fractions of the steps, not at {end:g}")
            before = end

    @classmethod
    def parse(cls, spec: str | None) -> "ImageSizes":
        """Reads a spec such as "16:0.4,24:0.7": 16 pixels up to 40 % of the steps, 24 up to 70 %; None for none."""
        try:
            pairs = [part.split(":") for part in spec.split(",")] if spec is not None else []
            stages = tuple((int(size), float(end)) for size, end in pairs)
        except ValueError:
            raise ValueError(f"progressive sizes must be like 16:0.4,24:0.7, not {spec!r}") from None
        return cls(stages)

    def __str__(self) -> str:
        return ",".join(f"{size}:{end:g}" for size, end in self.stages)

    def at(self, step: int, total: int) -> int | None:
        """Returns the size at a step; None for the full size."""
        return next((size for size, end in self.stages if step < round(end * total)), None)

    def changes(self, total: int) -> list[int]:
        """Returns the steps at which the size changes."""
        return [round(end * total) for _, end in self.stages]
