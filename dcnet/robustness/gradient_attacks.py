"""Attacks that follow the gradient of the network: FGSM, BIM and PGD."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from dcnet.ascent import LOSSES, Ascent, Best, Goal, Track, norms
from dcnet.checks import check_choice, check_number, check_whole
from dcnet.data.batches import hash_seed
from dcnet.robustness.task import Attack, Task, register


@dataclass(frozen=True, kw_only=True)
class GradientAttack(Attack):
    """x <- project(x + step * steepest(gradient)), `steps` times, from each of the starts.

    Attributes:
        norm: "linf" or "l2".
        loss: what to maximize: "ce" is the cross entropy, "margin" the lead of the best other class.
        steps: the number of steps.
        step: the length of a step; None for reach * epsilon / steps, where the reach of bim is 2 and that of pgd 2.5.
        restarts: the number of starts; later ones attack the images that the network still classifies correctly.
        momentum: the decay of the accumulated gradient; 0 for none.
        random_start: start at a random point within epsilon.
        early_stop: stop changing an image once the network misclassifies it; otherwise all images take all steps.
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
        check_choice("loss", self.loss, LOSSES)
        check_whole("steps", self.steps, 1)
        check_whole("restarts", self.restarts, 1)
        if self.step is not None:
            check_number("step", self.step, above=0)
        check_number("momentum", self.momentum, least=0)
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"{self.restarts} restarts without random_start are identical: set random_start=True")

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
        return Ascent(goal, norms[self.norm], task.epsilon, step, self.steps, self.momentum, task.compiled)

    def _batch(self, task: Task, ascent: Ascent, rows: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device)
        track = Track(places, x, labels, x, torch.zeros_like(x))
        if self.restarts == 1 and not self.early_stop:
            return ascent(self._started(track, rows, task, 0)).images
        best = Best(x)
        if self.early_stop and self.random_start:
            best.update(places, x, *ascent.goal.evaluate(x, labels))
        for restart in range(self.restarts):
            left = track.without(best.broken)
            if not len(left):
                break
            ascent(self._started(left, rows, task, restart), best, self.early_stop)
        return best.images

    def _started(self, track: Track, rows: Tensor, task: Task, restart: int) -> Track:
        if not self.random_start:
            return track
        noise = norms[self.norm].sample_ball(track.x, rows[track.at], hash_seed(task.seed, restart))
        return replace(track, images=(track.x + task.epsilon * noise).clamp(0, 1))


@register
@dataclass(frozen=True, kw_only=True)
class FGSM(GradientAttack):
    """One step of length epsilon for all images: the fast gradient sign method, and its counterpart for "l2"."""

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
    """Small steps from the image: the basic iterative method; with a momentum of 1, MI-FGSM."""

    name: ClassVar[str] = "bim"
    about: ClassVar[str] = "small steps from the image"
    reach: ClassVar[float] = 2.0
    steps: int = 10
    restarts: int = field(default=1, init=False)
    random_start: bool = field(default=False, init=False)


@register
@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Small steps from random starts within epsilon: projected gradient descent."""

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "small steps from random starts within epsilon"
    reach: ClassVar[float] = 2.5
    steps: int = 40
    random_start: bool = True
