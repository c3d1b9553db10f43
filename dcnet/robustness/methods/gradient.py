"""Attacks that follow the gradient: one loop, told apart by their defaults and by what may be chosen."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from dcnet.data.order import mixed
from dcnet.learnable import check_number
from dcnet.robustness.ascent import Ascent, Best, Track
from dcnet.robustness.attack import Attack, check_count, register
from dcnet.robustness.goal import LOSSES, Goal
from dcnet.robustness.norms import as_norm
from dcnet.robustness.task import Task
from dcnet.spec import unknown


@dataclass(frozen=True, kw_only=True)
class GradientAttack(Attack):
    """x <- project(x + step * steepest(gradient)), `steps` times, from each of the starts.

    Attributes:
        norm: "linf" or "l2".
        loss: what grows: "ce" is the cross entropy, "margin" the lead of the best other class.
        steps: how many steps.
        step: the length of one; None for reach * epsilon / steps, where the reach of bim is 2 and that of pgd 2.5.
        restarts: how often it begins anew, with the images that are not broken yet.
        momentum: the share of the past steps' direction that is carried on.
        random_start: begin anywhere within epsilon.
        early_stop: an image is left alone as soon as it is broken, which some are before the first step; without, all
            are moved by all steps.
    """

    reach: ClassVar[float]
    loss: str = "ce"
    steps: int
    step: float | None = None
    restarts: int = 1
    momentum: float = 0.0
    random_start: bool = False
    early_stop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        check_count("steps", self.steps)
        check_count("restarts", self.restarts)
        if self.step is not None:
            check_number("step", self.step, above=0)
        check_number("momentum", self.momentum)
        if self.momentum < 0:
            raise ValueError(f"momentum must not be negative, not {self.momentum!r}")
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"{self.restarts} restarts without random_start are the same one: set random_start")

    @property
    def searching(self) -> bool:
        return self.early_stop

    def at_full_strength(self) -> Attack:
        return replace(self, early_stop=False) if self.early_stop else self

    def images(self, task: Task) -> Tensor:
        ascent = self._ascent(task)
        found = [self._batch(task, ascent, *batch).to(task.x.device) for batch in task.batches()]
        return torch.cat(found).contiguous()

    def _ascent(self, task: Task) -> Ascent:
        network = torch.compile(task.model) if task.compiled else task.model
        goal = Goal(network, LOSSES[self.loss], task.targets is not None)
        step = self.reach * task.epsilon / self.steps if self.step is None else self.step
        return Ascent(goal, as_norm(self.norm), task.epsilon, step, self.steps, self.momentum, task.compiled)

    def _batch(self, task: Task, ascent: Ascent, rows: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device)
        track = Track(places, x, labels, x, torch.zeros_like(x))
        if self.restarts == 1 and not self.early_stop:
            return ascent(self._started(track, rows, task, 0)).images
        best = Best(x)
        if self.early_stop and self.random_start:
            best.take(places, x, *ascent.goal.judged(x, labels))
        for restart in range(self.restarts):
            left = track.without(best.broken)
            if not len(left):
                break
            ascent(self._started(left, rows, task, restart), best, self.early_stop)
        return best.images

    def _started(self, track: Track, rows: Tensor, task: Task, restart: int) -> Track:
        if not self.random_start:
            return track
        noise = as_norm(self.norm).scattered(track.x, rows[track.at], mixed(task.seed, restart))
        return replace(track, images=(track.x + task.epsilon * noise).clamp(0, 1))


@register
@dataclass(frozen=True, kw_only=True)
class FGSM(GradientAttack):
    """One step as far as epsilon, of all images: the fast gradient sign method, and its like for "l2"."""

    name: ClassVar[str] = "fgsm"
    about: ClassVar[str] = "one step along the sign of the gradient"
    reach: ClassVar[float] = 1.0
    steps: int = field(default=1, init=False)
    step: float | None = field(default=None, init=False)
    restarts: int = field(default=1, init=False)
    momentum: float = field(default=0.0, init=False)
    random_start: bool = field(default=False, init=False)
    early_stop: bool = field(default=False, init=False)


@register
@dataclass(frozen=True, kw_only=True)
class BIM(GradientAttack):
    """Small steps from the image itself: the basic iterative method; with a momentum of 1, MI-FGSM."""

    name: ClassVar[str] = "bim"
    about: ClassVar[str] = "small steps from the image itself"
    reach: ClassVar[float] = 2.0
    steps: int = 10
    restarts: int = field(default=1, init=False)
    random_start: bool = field(default=False, init=False)


@register
@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Small steps from anywhere within epsilon, begun anew as often as wanted: projected gradient descent."""

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "small steps from random places within epsilon"
    reach: ClassVar[float] = 2.5
    steps: int = 40
    random_start: bool = True
