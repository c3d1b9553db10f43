"""The loop of FGSM, BIM and PGD, also for adversarial training: step direction (the sign for linf) and projection."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.data.batches import hash_seed
from dcnet.registry import Registry


class Norm:
    """A norm of perturbations [N, ...], per image."""

    name: ClassVar[str]

    def size(self, delta: Tensor) -> Tensor:
        """The norm of each perturbation, [N]."""
        raise NotImplementedError

    def project(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        """The nearest perturbation of size at most epsilon."""
        raise NotImplementedError

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of size 1 of steepest ascent for a gradient; zero where the gradient is zero."""
        raise NotImplementedError

    def sample_ball(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        """Perturbations shaped as `like`, uniform in the unit ball, for the images with indices `rows`."""
        raise NotImplementedError

    def max_size(self, pixels: int) -> float:
        """The largest possible size of a perturbation between two images with this many values in [0, 1]."""
        raise NotImplementedError


norms: Registry[Norm] = Registry("a norm")
Kind = TypeVar("Kind", bound=type[Norm])


def register(kind: Kind) -> Kind:
    """A decorator that adds a norm to the registry under its name."""
    norms.add(kind.name, kind())
    return kind


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """Reshapes one value per image to broadcast against [N, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


@register
class Linf(Norm):
    """The largest change of a pixel."""

    name = "linf"

    def size(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)

    def project(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        return delta.clamp(-epsilon, epsilon)  # type: ignore[arg-type]

    def steepest(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def sample_ball(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        return (2 * uniform(seed, rows, like.shape[1:]) - 1).to(like.dtype)

    def max_size(self, pixels: int) -> float:
        return 1.0


@register
class L2(Norm):
    """The Euclidean norm of all changes."""

    name = "l2"

    def size(self, delta: Tensor) -> Tensor:
        return torch.linalg.vector_norm(delta.flatten(1), dim=1)

    def project(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        size = self.size(delta).clamp(min=torch.finfo(delta.dtype).tiny)
        return delta * per_image((epsilon / size).clamp(max=1), delta)

    def steepest(self, gradient: Tensor) -> Tensor:
        # Divided by the largest entry first: where a softmax saturates, squared gradients underflow in float32.
        scaled = gradient / per_image(_one_for_zero(gradient.flatten(1).abs().amax(1)), gradient)
        return scaled / per_image(_one_for_zero(self.size(scaled)), gradient)

    def sample_ball(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        direction = self.steepest(normal(hash_seed(seed, 0), rows, like.shape[1:]))
        # The volume of a ball grows with its radius to the power of its dimension.
        radius = uniform(hash_seed(seed, 1), rows) ** (1 / like[0].numel())
        return (direction * per_image(radius, direction)).to(like.dtype)

    def max_size(self, pixels: int) -> float:
        return math.sqrt(pixels)


def _one_for_zero(sizes: Tensor) -> Tensor:
    return torch.where(sizes == 0, 1, sizes)


# The constants of splitmix64 as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
# An integer of this many bits plus 0.5 is exact in float32, so neither 0 nor 1 is drawn.
BITS = 23


def uniform(seed: int, rows: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Random numbers in (0, 1), float32 [len(rows), *shape], a function of the seed and the image indices `rows`."""
    count = math.prod(shape)
    places = rows[:, None] * count + torch.arange(1, count + 1, device=rows.device)
    bits = _shift_right(_scramble(places * GOLDEN + seed), 64 - BITS)
    return ((bits.float() + 0.5) / (1 << BITS)).view(len(rows), *shape)


def normal(seed: int, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal random numbers, float32 [len(rows), *shape]; see `uniform`."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(seed, rows, shape) - 1)


def _scramble(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * FIRST
    bits = (bits ^ _shift_right(bits, 27)) * SECOND
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; that of torch repeats the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def as_seed(given: int | torch.Generator) -> int:
    """The seed itself, or one drawn from a generator."""
    if isinstance(given, torch.Generator):
        return int(torch.randint(1 << 62, (), generator=given, device=given.device))
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1 or a torch.Generator, not {given!r}")
    return given


Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)_y, [N]."""
    return F.cross_entropy(logits, labels, reduction="none")


# The smoothing and the floor of the paper's training loss.
SMOOTHING, FLOOR = 0.01, 1e-4


def floored(logits: Tensor, labels: Tensor) -> Tensor:
    """-sum_j y_j log(softmax(logits)_j + 1e-4), [N], with labels y smoothed by 0.01: the paper's training loss."""
    logs = (logits.softmax(1) + FLOOR).log()
    target = logs.gather(1, labels[:, None]).squeeze(1)
    return -((1 - SMOOTHING) * target + SMOOTHING * logs.mean(1))


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} logits_j - logits_y, [N]: its gradient does not vanish where the softmax saturates."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own.squeeze(1)


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the label has the highest logit, bool [N]; with a NaN among the logits there is no prediction."""
    return (logits.argmax(1) == labels) & ~logits.isnan().any(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "floored": floored}


@dataclass(frozen=True)
class Goal:
    """The objective of an attack: away from the labels, or towards them if they are targets.

    Args:
        network: maps images to logits.
        loss: a function of logits and labels, per image; lower for a more likely label.
        targeted: whether the labels are targets.
    """

    network: Callable[[Tensor], Tensor]
    loss: Loss
    targeted: bool = False

    def evaluate(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The score to maximize, [N], and whether the attack succeeds, bool [N].

        Logits with a NaN count as a wrong prediction, as in `accuracy`: only an untargeted attack succeeds.
        """
        logits = self.network(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        hit = is_correct(logits, labels)
        loss = self.loss(logits, labels)
        return (-loss, hit) if self.targeted else (loss, ~hit)

    def gradient(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the score with respect to the images, the score, and whether the attack succeeds."""
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            score, broken = self.evaluate(images, labels)
            if not score.requires_grad:
                raise ValueError(
                    "the logits have no gradient with respect to the images: use an attack that needs none, such as "
                    "square, or transfer from another network"
                )
            (gradient,) = torch.autograd.grad(score.sum(), images)
        # One NaN would make the whole image NaN; with it replaced, the other pixels still move.
        return gradient.nan_to_num(), score.detach(), broken


@dataclass(frozen=True)
class Track:
    """Images under attack.

    Args:
        at: their indices in the batch, int64 [M].
        x: the clean images.
        labels: labels or targets.
        images: the current images.
        velocity: the running sum of gradients for momentum.
    """

    at: Tensor
    x: Tensor
    labels: Tensor
    images: Tensor
    velocity: Tensor

    def __len__(self) -> int:
        return len(self.at)

    def without(self, broken: Tensor) -> "Track":
        """Drops broken images once they are half of the batch or more: each new batch size has a setup cost."""
        still = ~broken[self.at]
        if 2 * int(still.sum()) > len(self):
            return self
        kept = still.nonzero()[:, 0]
        return Track(self.at[kept], self.x[kept], self.labels[kept], self.images[kept], self.velocity[kept])


class Best:
    """Keeps for each image of a batch the first adversarial image found, or else the one with the highest score."""

    def __init__(self, x: Tensor):
        self.images = x.clone()
        self.score = torch.full((len(x),), -torch.inf, dtype=torch.float64, device=x.device)
        self.broken = torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def update(self, at: Tensor, images: Tensor, score: Tensor, broken: Tensor) -> None:
        """Considers images for the indices `at`, without device synchronization."""
        better = ~self.broken[at] & (broken | (score > self.score[at]))
        self.images[at] = torch.where(per_image(better, images), images, self.images[at])
        self.score[at] = torch.where(better, score.double(), self.score[at])
        self.broken[at] |= broken


@dataclass(frozen=True)
class Ascent:
    """Projected gradient ascent in the steepest direction of v = momentum v + g / mean |g|, for the gradient g.

    Args:
        goal: the objective.
        norm: the norm of the perturbation, which defines the steepest direction and the projection.
        epsilon: the largest norm of the perturbation.
        step: length of a step.
        steps: number of steps.
        momentum: factor of the previous v; 0 for the gradient alone.
        compiled: compile the update of a step.
    """

    goal: Goal
    norm: Norm
    epsilon: float
    step: float
    steps: int
    momentum: float = 0.0
    compiled: bool = False

    def __call__(self, track: Track, best: Best | None = None, stop: bool = False) -> Track:
        """Returns the images after all steps, and reports them to `best`.

        With `stop`, the images of every step are reported, and broken images are not changed further. Without `stop`
        there is no device synchronization.
        """
        # Tensors, since torch.compile would specialize on numbers and recompile for each epsilon.
        lengths = [track.x.new_full((), length) for length in (self.epsilon, self.step, self.momentum)]
        move = _compiled_move() if self.compiled else _move
        for _ in range(self.steps):
            if stop and best is not None:
                track = track.without(best.broken)
                if not len(track):
                    return track
            gradient, score, broken = self.goal.gradient(track.images, track.labels)
            if stop and best is not None:
                best.update(track.at, track.images, score, broken)
            momentum = self.momentum != 0
            images, velocity = move(track.x, track.images, track.velocity, gradient, lengths, self.norm, momentum)
            track = dataclasses.replace(track, images=images, velocity=velocity)
        if best is not None:
            best.update(track.at, track.images, *self.goal.evaluate(track.images, track.labels))
        return track


def _move(
    x: Tensor,
    images: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    lengths: list[Tensor],
    norm: Norm,
    with_momentum: bool,
) -> tuple[Tensor, Tensor]:
    epsilon, step, momentum = lengths
    if with_momentum:
        size = _one_for_zero(gradient.flatten(1).abs().mean(1))
        velocity = momentum * velocity + gradient / per_image(size, gradient)
    direction = norm.steepest(velocity if with_momentum else gradient)
    delta = norm.project(images + step * direction - x, epsilon)
    return (x + delta).clamp(0, 1), velocity


@cache
def _compiled_move() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_move)
