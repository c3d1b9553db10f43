"""Training on images that were changed against the network: who changes them, and what the loss is then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from dcnet.learnable import check_number
from dcnet.robustness.ascent import Ascent, Track
from dcnet.robustness.goal import Goal, Loss
from dcnet.robustness.norms import as_norm
from dcnet.robustness.undisturbed import frozen
from dcnet.spec import made_by

Call = Callable[..., Any]
# The loss that is trained on, of images with their labels, and the logits.
TrainLoss = Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Target:
    """A network: as it is called in training, as it is called to be attacked, and the module with its buffers."""

    trained: Call
    attacked: Call
    module: nn.Module


@dataclass(frozen=True)
class Adversary:
    """Moves each pixel by at most epsilon, of pixels from 0 to 1, where the loss grows; steps as in `robustness`.

    Nothing in it waits for the device, so that a step can be captured.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    epsilon: float = 8 / 255

    def __post_init__(self) -> None:
        check_number(f"epsilon of {self.name}", self.epsilon, above=0)
        if self.epsilon > 1:
            raise ValueError(f"epsilon of {self.name} is of pixels from 0 to 1 and must not be above 1: {self.epsilon}")

    def __str__(self) -> str:
        """The spec, which `as_adversary` reads; what is as by default is left out."""
        given = ((name, field.default, getattr(self, name)) for name, field in self.__dataclass_fields__.items())
        changed = [f"{name}={_written(value)}" for name, default, value in given if value != default]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    @property
    def takes_margins(self) -> bool:
        """Whether it goes with a head that has a margin, and so a loss of its own."""
        return True

    @property
    def cost(self) -> float:
        """Forward and backward passes of a step, where plain training has one."""
        raise NotImplementedError

    def loss(self, of: TrainLoss, target: Target, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What training makes small, and the logits that are counted: those of the images as they are, if it has them.

        Args:
            of: the loss without an adversary.
            target: the network.
            images: from 0 to 1.
            labels: theirs.
        """
        raise NotImplementedError


def _written(value: Any) -> str:
    """A value as a spec has it: in steps of a pixel, as 6/255, where that is shorter and the very same."""
    exact = repr(value)
    if not isinstance(value, float):
        return exact
    steps = f"{255 * value:g}"
    return f"{steps}/255" if float(steps) / 255 == value and len(steps) + 4 < len(exact) else exact


adversaries: dict[str, type[Adversary]] = {}
Kind = TypeVar("Kind", bound=type[Adversary])


def register(kind: Kind) -> Kind:
    """Enters an adversary into the registry under its name."""
    if kind.name in adversaries:
        raise ValueError(f"{kind.name!r} is taken: {adversaries[kind.name].__name__} is an adversary of that name")
    adversaries[kind.name] = kind
    return kind


def as_adversary(given: Adversary | str) -> Adversary:
    """The adversary of a spec such as `fgsm` or `pgd(epsilon=8/255,steps=7)`, or the adversary itself."""
    if isinstance(given, Adversary):
        return given
    adversary: Adversary = made_by(adversaries, "adversary", given)
    return adversary


def climbed(
    attacked: Call, loss: Loss, labels: Tensor, x: Tensor, start: Tensor, epsilon: float, step: float, steps: int
) -> Tensor:
    """The images after steps by which the loss of each grows, within epsilon of x and from 0 to 1."""
    ascent = Ascent(Goal(attacked, loss), as_norm("linf"), epsilon, step, steps)
    places = torch.arange(len(x), device=x.device)
    return ascent(Track(places, x, labels, start, torch.zeros_like(x))).images


@contextmanager
def unnoticed(module: nn.Module) -> Iterator[None]:
    """Inside, the module may track what it sees, such as means for normalisation; afterwards it has seen nothing."""
    buffers = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        with frozen(module):
            yield
    finally:
        with torch.no_grad():
            for buffer, kept in zip(buffers, before, strict=True):
                buffer.copy_(kept)


def scattered(x: Tensor, epsilon: float) -> Tensor:
    """Anywhere within epsilon."""
    return (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
