"""Adversarial training: FGSM, N-FGSM, PGD and TRADES."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.checks import check_number, check_whole
from dcnet.gradient_attack import Ascent, Goal, Loss, Track, cross_entropy, norms
from dcnet.modes import frozen, kept_buffers
from dcnet.registry import Registry
from dcnet.spec import format_call, parse_call

Call = Callable[..., Any]
# Takes a network, images and labels; returns the loss and the logits.
TrainLoss = Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Target:
    """The network to attack.

    Attributes:
        trained: the callable of the training step, such as the DDP wrapper.
        attacked: the callable that the attack differentiates.
        module: the module that holds the parameters and buffers.
    """

    trained: Call
    attacked: Call
    module: nn.Module

    def perturb(
        self, loss: Loss, labels: Tensor, x: Tensor, start: Tensor, epsilon: float, step: float, steps: int
    ) -> Tensor:
        """Returns images after gradient ascent steps, within epsilon of x and in [0, 1]; keeps buffers as they are."""
        ascent = Ascent(Goal(self.attacked, loss), norms["linf"], epsilon, step, steps)
        places = torch.arange(len(x), device=x.device)
        with kept_buffers(self.module), frozen(self.module):
            return ascent(Track(places, x, labels, start, torch.zeros_like(x))).images


@dataclass(frozen=True)
class Adversary:
    """Adversarial training: perturbs each pixel by at most epsilon, within [0, 1], to increase the loss.

    Nothing synchronizes with the device, so that a step can be captured as a CUDA graph.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    epsilon: float = 8 / 255

    def __post_init__(self) -> None:
        check_number(f"epsilon of {self.name}, for pixels in [0, 1],", self.epsilon, above=0, most=1)

    def __str__(self) -> str:
        """Returns the spec that `as_adversary` parses, without default values."""
        return format_call(self, self.name, _format_value)

    @property
    def takes_margins(self) -> bool:
        """Whether the adversary supports heads with a margin, which compute their own loss."""
        return True

    @property
    def cost(self) -> float:
        """Forward and backward passes per step, relative to plain training."""
        raise NotImplementedError

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the training loss and the logits to compute the accuracy from.

        The logits are those of the clean images if the adversary computes them, otherwise of the adversarial ones.

        Args:
            of: computes the loss without an adversary.
            target: the network.
            images: pixels in [0, 1].
            labels: the labels of the images.
        """
        raise NotImplementedError


def _format_value(value: Any) -> str:
    """Formats a value of a spec; as a fraction such as 6/255 if that is exact and shorter."""
    exact = repr(value)
    if not isinstance(value, float):
        return exact
    steps = f"{255 * value:g}"
    return f"{steps}/255" if float(steps) / 255 == value and len(steps) + 4 < len(exact) else exact


adversaries: Registry[type[Adversary]] = Registry("an adversary")
register = adversaries.register


def as_adversary(given: Adversary | str) -> Adversary:
    """Parses a spec such as `fgsm` or `pgd(epsilon=8/255,steps=7)`; an adversary is returned unchanged."""
    if isinstance(given, Adversary):
        return given
    adversary: Adversary = parse_call(given, adversaries)
    return adversary


@register
@dataclass(frozen=True)
class FGSM(Adversary):
    """Trains on clean images and FGSM images in one batch, weighted by 1 - share and share.

    With `predicted`, the perturbation increases the loss of the predicted class instead of that of the label, which
    avoids label leaking.
    """

    name: ClassVar[str] = "fgsm"
    about: ClassVar[str] = "clean images, and images after one step along the sign of the gradient"
    share: float = 0.5
    predicted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"share of {self.name}", self.share, above=0, most=1)
        if not isinstance(self.predicted, bool):
            raise ValueError(f"predicted of {self.name} must be True or False, not {self.predicted!r}")

    @property
    def takes_margins(self) -> bool:
        return self.share in (0.5, 1.0)

    @property
    def cost(self) -> float:
        return 1.0 + (1.0 if self.share == 1 else 2.0)

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = _prediction_cross_entropy if self.predicted else cross_entropy
        changed = target.perturb(loss, labels, images, images, self.epsilon, self.epsilon, 1)
        if self.share == 1:
            return of(target.trained, changed, labels)
        return _mixed_loss(of, target.trained, images, changed, labels, self.share)


@register
@dataclass(frozen=True)
class NFGSM(Adversary):
    """Trains on images after uniform noise of at most noise * epsilon per pixel, and a step of epsilon from there.

    The perturbation is not projected, so it has up to (1 + noise) * epsilon per pixel; pixels stay in [0, 1].
    """

    name: ClassVar[str] = "n-fgsm"
    about: ClassVar[str] = "images after noise, and one step along the sign of the gradient, without projection"
    noise: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"noise of {self.name}", self.noise, least=0)

    @property
    def cost(self) -> float:
        return 2.0

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        start = (images + self.noise * self.epsilon * (2 * torch.rand_like(images) - 1)).clamp(0, 1)
        changed = target.perturb(cross_entropy, labels, start, start, self.epsilon, self.epsilon, 1)
        return of(target.trained, changed, labels)


@register
@dataclass(frozen=True)
class PGD(Adversary):
    """Trains on images after several gradient steps from a random start, without clean images."""

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "images after several steps from a random start within epsilon"
    steps: int = 7
    step: float = 2 / 255

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", _checked_steps(self.name, self.steps, self.step))

    @property
    def cost(self) -> float:
        return 1.0 + self.steps

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        start = (images + self.epsilon * (2 * torch.rand_like(images) - 1)).clamp(0, 1)
        changed = target.perturb(cross_entropy, labels, images, start, self.epsilon, self.step, self.steps)
        return of(target.trained, changed, labels)


@register
@dataclass(frozen=True)
class TRADES(Adversary):
    """Minimizes the loss of clean images x plus beta KL(p(x) || p(x')), where x' maximizes the divergence."""

    name: ClassVar[str] = "trades"
    about: ClassVar[str] = "clean images, plus beta times the divergence of predictions after several steps"
    beta: float = 6.0
    steps: int = 10
    step: float = 2 / 255

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", _checked_steps(self.name, self.steps, self.step))
        check_number(f"beta of {self.name}", self.beta, above=0)

    @property
    def takes_margins(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return 2.0 + self.steps

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Start from noise, since the gradient of the divergence is 0 at the clean image.
        start = (images + 1e-3 * torch.randn_like(images)).clamp(0, 1)
        with kept_buffers(target.module), frozen(target.module):
            with torch.no_grad():
                answer = target.attacked(images).float().softmax(1)

            def divergence(logits: Tensor, labels: Tensor) -> Tensor:
                return F.kl_div(logits.log_softmax(1), answer, reduction="none").sum(1)

            classes = answer.argmax(1)
            changed = target.perturb(divergence, classes, images, start, self.epsilon, self.step, self.steps)
        logits, moved = target.trained(torch.cat([images, changed])).float().chunk(2)
        natural, _ = of(lambda given: logits, images, labels)
        apart = F.kl_div(moved.log_softmax(1), logits.softmax(1), reduction="batchmean")
        return natural + self.beta * apart, logits


def _mixed_loss(
    of: TrainLoss, network: Call, images: Tensor, changed: Tensor, labels: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of clean and adversarial images, in one batch so that they share the batch statistics."""
    if share == 0.5:
        loss, logits = of(network, torch.cat([images, changed]), torch.cat([labels, labels]))
        return loss, logits[: len(images)]
    natural, changed_logits = network(torch.cat([images, changed])).chunk(2)
    loss, logits = of(lambda given: natural, images, labels)
    return (1 - share) * loss + share * of(lambda given: changed_logits, changed, labels)[0], logits


def _prediction_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy with the predicted class; the labels are ignored."""
    return cross_entropy(logits, logits.argmax(1))


def _checked_steps(name: str, steps: Any, step: Any) -> int:
    """Checks the number and the size of steps. Returns the number as an int of Python, since a spec has no other."""
    check_number(f"step of {name}", step, above=0)
    return check_whole(f"steps of {name}", steps, 1)
