"""The adversaries to train with; one more is one class here, or in a file of one's own."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.learnable import check_number
from dcnet.robustness.goal import Loss, cross_entropy
from dcnet.training.adversary import (
    Adversary,
    Call,
    Target,
    TrainLoss,
    adversaries,
    as_adversary,
    climbed,
    register,
    scattered,
    unnoticed,
)

__all__ = ["FGSM", "PGD", "TRADES", "Adversary", "adversaries", "as_adversary"]


@register
@dataclass(frozen=True)
class FGSM(Adversary):
    """Every image as it is and after one step as far as epsilon, in one batch, with weights 1 - share and share.

    With `predicted` the step is away from what the network takes the image for and not from its label, which the
    network could otherwise learn to read from the step itself: label leaking.
    """

    name: ClassVar[str] = "fgsm"
    about: ClassVar[str] = "images as they are, and after one step along the sign of the gradient"
    share: float = 0.5
    predicted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"share of {self.name}", self.share, above=0)
        if self.share > 1:
            raise ValueError(f"share of {self.name} must be at most 1, not {self.share!r}")
        if not isinstance(self.predicted, bool):
            raise ValueError(f"predicted of {self.name} must be True or False, not {self.predicted!r}")

    @property
    def takes_margins(self) -> bool:
        return self.share in (0.5, 1.0)

    @property
    def cost(self) -> float:
        return 1.0 + (1.0 if self.share == 1 else 2.0)

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with unnoticed(target.module):
            loss = _against_the_answer if self.predicted else cross_entropy
            changed = climbed(target.attacked, loss, labels, images, images, self.epsilon, self.epsilon, 1)
        if self.share == 1:
            return of(target.trained, changed, labels)
        return _of_both(of, target.trained, images, changed, labels, self.share)


@register
@dataclass(frozen=True)
class PGD(Adversary):
    """Images after steps from anywhere within epsilon, and none as they are."""

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "images after small steps from random places within epsilon"
    steps: int = 7
    step: float = 2 / 255

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_steps(self.name, self.steps, self.step)

    @property
    def cost(self) -> float:
        return 1.0 + self.steps

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        start = scattered(images, self.epsilon)
        with unnoticed(target.module):
            reach = (self.epsilon, self.step, self.steps)
            changed = climbed(target.attacked, cross_entropy, labels, images, start, *reach)
        return of(target.trained, changed, labels)


@register
@dataclass(frozen=True)
class TRADES(Adversary):
    """The loss of images as they are, and beta times how far the answer moves when they are changed.

    beta KL(p(x) || p(x')), where x' is found by steps that make the same divergence large.
    """

    name: ClassVar[str] = "trades"
    about: ClassVar[str] = "images as they are, and beta times how far small steps move the answer"
    beta: float = 6.0
    steps: int = 10
    step: float = 2 / 255

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_steps(self.name, self.steps, self.step)
        check_number(f"beta of {self.name}", self.beta, above=0)

    @property
    def takes_margins(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return 2.0 + self.steps

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Barely moved, since at the image itself the divergence has no slope.
        start = (images + 1e-3 * torch.randn_like(images)).clamp(0, 1)
        with unnoticed(target.module):
            with torch.no_grad():
                answer = target.attacked(images).float().softmax(1)
            reach = (self.epsilon, self.step, self.steps)
            changed = climbed(target.attacked, divergence(answer), answer.argmax(1), images, start, *reach)
        logits, moved = target.trained(torch.cat([images, changed])).float().chunk(2)
        natural, _ = of(lambda given: logits, images, labels)
        apart = F.kl_div(moved.log_softmax(1), logits.softmax(1), reduction="batchmean")
        return natural + self.beta * apart, logits


def _of_both(
    of: TrainLoss, network: Call, images: Tensor, changed: Tensor, labels: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """The losses of both in one batch, so that what normalises sees the two together."""
    if share == 0.5:
        loss, logits = of(network, torch.cat([images, changed]), torch.cat([labels, labels]))
        return loss, logits[: len(images)]
    natural, hostile = network(torch.cat([images, changed])).chunk(2)
    loss, logits = of(lambda given: natural, images, labels)
    return (1 - share) * loss + share * of(lambda given: hostile, changed, labels)[0], logits


def _against_the_answer(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy with what the logits say, whatever the labels: the one pass of the step has the answer, too."""
    return cross_entropy(logits, logits.argmax(1))


def divergence(answer: Tensor) -> Loss:
    """KL(answer || softmax(logits)) of each image, whatever the labels."""
    return lambda logits, labels: F.kl_div(logits.log_softmax(1), answer, reduction="none").sum(1)


def _check_steps(name: str, steps: Any, step: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps of {name} must be a whole number, 1 or more, not {steps!r}")
    check_number(f"step of {name}", step, above=0)
