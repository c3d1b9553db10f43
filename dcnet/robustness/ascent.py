"""The one loop of all attacks by gradient: steps along the steepest direction of a norm, and back into its ball."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dcnet.robustness.goal import Goal
from dcnet.robustness.norms import Norm, each


@dataclass(frozen=True)
class Track:
    """Images on their way.

    Args:
        at: their places in the batch, int64 [M].
        x: where they come from.
        labels: what the goal wants of them.
        images: where they are.
        velocity: the sum of past gradients, which momentum carries on.
    """

    at: Tensor
    x: Tensor
    labels: Tensor
    images: Tensor
    velocity: Tensor

    def __len__(self) -> int:
        return len(self.at)

    def without(self, broken: Tensor) -> "Track":
        """Those of them that are not broken, once that is half or less: each new size costs something to set up."""
        still = ~broken[self.at]
        if 2 * int(still.sum()) > len(self):
            return self
        kept = still.nonzero()[:, 0]
        return Track(self.at[kept], self.x[kept], self.labels[kept], self.images[kept], self.velocity[kept])


class Best:
    """The first image found that is broken, else the one with the highest score, for each of a batch."""

    def __init__(self, x: Tensor):
        self.images = x.clone()
        self.score = torch.full((len(x),), -torch.inf, dtype=torch.float64, device=x.device)
        self.broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def take(self, at: Tensor, images: Tensor, score: Tensor, broken: Tensor) -> None:
        """Looks at images for the places `at`; nothing here waits for the device."""
        better = ~self.broken[at] & (broken | (score > self.score[at]))
        self.images[at] = torch.where(each(better, images), images, self.images[at])
        self.score[at] = torch.where(better, score.double(), self.score[at])
        self.broken[at] |= broken


@dataclass(frozen=True)
class Ascent:
    """Steps v = momentum v + g / |g|, g the gradient and |g| its mean size, in the steepest direction that v has.

    Args:
        goal: what is made large.
        norm: of the perturbation; it says which direction is steepest, and where the ball ends.
        epsilon: the radius of the ball.
        step: the length of a step.
        steps: how many.
        momentum: the share of v that is carried on; 0 for the gradient alone.
        compiled: whether what a step does with the gradient is compiled.
    """

    goal: Goal
    norm: Norm
    epsilon: float
    step: float
    steps: int
    momentum: float = 0.0
    compiled: bool = False

    def __call__(self, track: Track, best: Best | None = None, stop: bool = False) -> Track:
        """The images after all steps, which `best` gets to see; with `stop` it sees all on the way, too.

        Without `stop` nothing waits for the device.
        """
        # Tensors, since numbers would be compiled in, and each epsilon compiled anew.
        lengths = [track.x.new_full((), length) for length in (self.epsilon, self.step, self.momentum)]
        for _ in range(self.steps):
            if stop and best is not None:
                track = track.without(best.broken)
                if not len(track):
                    return track
            gradient, score, broken = self.goal.gradient(track.images, track.labels)
            if stop and best is not None:
                best.take(track.at, track.images, score, broken)
            track = self._moved(track, gradient, lengths)
        if best is not None:
            best.take(track.at, track.images, *self.goal.judged(track.images, track.labels))
        return track

    def _moved(self, track: Track, gradient: Tensor, lengths: list[Tensor]) -> Track:
        move = _compiled_move() if self.compiled else _move
        carried = self.momentum != 0
        images, velocity = move(track.x, track.images, track.velocity, gradient, lengths, self.norm, carried)
        return dataclasses.replace(track, images=images, velocity=velocity)


def _move(
    x: Tensor, images: Tensor, velocity: Tensor, gradient: Tensor, lengths: list[Tensor], norm: Norm, carried: bool
) -> tuple[Tensor, Tensor]:
    epsilon, step, momentum = lengths
    if carried:
        velocity = momentum * velocity + gradient / each(_mean_size(gradient), gradient)
    direction = norm.steepest(velocity if carried else gradient)
    delta = norm.projected(images + step * direction - x, epsilon)
    return (x + delta).clamp(0, 1), velocity


@cache
def _compiled_move() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_move)


def _mean_size(gradient: Tensor) -> Tensor:
    size = gradient.flatten(1).abs().mean(1)
    return torch.where(size == 0, 1, size)
