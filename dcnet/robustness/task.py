"""The base class of attacks and its registry, the Task that an attack gets, and accuracy."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dcnet.checks import check_images, check_labels, check_whole, is_number
from dcnet.gradient_attack import is_correct, norms
from dcnet.modes import frozen_eval
from dcnet.registry import Registry
from dcnet.spec import format_call

BATCH = 500


@dataclass(frozen=True)
class Task:
    """Images in [0, 1], labels and the budget of an attack.

    Args:
        model: maps pixels to logits [N, classes]; it is in evaluation mode.
        x: the images [N, ...], which go to the model batch by batch.
        labels: their classes, int64 [N].
        targets: the classes that the model should predict, int64 [N]; None for any class but the label.
        epsilon: the largest perturbation, in the norm of the attack.
        seed: for all random numbers.
        batch_size: images attacked at once.
        compiled: whether to compile the step of the attack.
        classes: the number of logits.
        device: the device of the model.
    """

    model: nn.Module
    x: Tensor
    labels: Tensor
    targets: Tensor | None
    epsilon: float
    seed: int
    batch_size: int
    compiled: bool
    classes: int
    device: torch.device

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields indices, images, and targets, or labels without targets, of each batch on the device of the model."""
        return batches(self.model, self.x, self.labels if self.targets is None else self.targets, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A search for images, near given ones, that a network misclassifies.

    `about` describes it in a line, `white_box` says whether it uses gradients of the network, and `takes_targets`
    whether it supports target classes.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    white_box: ClassVar[bool] = True
    takes_targets: ClassVar[bool] = True
    norm: str = "linf"

    def __post_init__(self) -> None:
        norms.canonical(self.norm)

    def __str__(self) -> str:
        """The name with all settings that differ from the default."""
        return format_call(self, self.name, str)

    @classmethod
    def fields(cls) -> list[dataclasses.Field[Any]]:
        """The settings of the attack, as fields of the dataclass."""
        return [field for field in dataclasses.fields(cls) if field.init]

    def settings(self) -> dict[str, Any]:
        """The values of the settings, for a record."""
        return {field.name: getattr(self, field.name) for field in self.fields()}

    @property
    def searching(self) -> bool:
        """Whether the attack stops changing an image once the network misclassifies it."""
        return True

    def at_full_strength(self) -> "Attack":
        """The attack without early stopping: it keeps changing images that the network misclassifies, if it can."""
        return self

    def images(self, task: Task) -> Tensor:
        """Attacks the images of the task. Returns images within the budget, on the device of the given ones."""
        raise NotImplementedError


registry: Registry[type[Attack]] = Registry("an attack", discover="dcnet.robustness", identifiers=True)
register = registry.register


def as_attack(given: Attack | str, **settings: Any) -> Attack:
    """The attack of that name, or the given attack, with these settings changed."""
    kind = type(given) if isinstance(given, Attack) else registry[given]
    known = [field.name for field in kind.fields()]
    if wrong := [key for key in settings if key not in known]:
        raise ValueError(f"{kind.name} has no setting {wrong[0]!r}: it has {', '.join(known)}")
    return dataclasses.replace(given, **settings) if isinstance(given, Attack) else kind(**settings)


def device_of(model: nn.Module, x: Tensor) -> torch.device:
    """The device of the model, or that of the images if it has no parameters and buffers."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), x.device)


def on_device(images: Tensor, device: torch.device) -> Tensor:
    """Images on the device; on a GPU with channels last, which is faster."""
    images = images.to(device)
    fast = images.is_cuda and images.dim() == 4
    return images.contiguous(memory_format=torch.channels_last) if fast else images


def batches(model: nn.Module, x: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Indices, images and labels of each batch, on the device of the model."""
    device = device_of(model, x)
    for begin in range(0, len(x), size):
        part = slice(begin, min(begin + size, len(x)))
        rows = torch.arange(part.start, part.stop, device=device)
        yield rows, on_device(x[part], device), labels[part].to(device)


def classes_of(model: nn.Module, x: Tensor) -> int:
    """The number of logits of a model in evaluation mode."""
    with torch.no_grad():
        logits = model(on_device(x[:1], device_of(model, x)))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 1:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{type(model).__name__} must return logits [N, classes], but returns {found} for one image")
    return logits.shape[1]


def check_labels_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Checks labels against the images and the number of logits of a model in evaluation mode."""
    return check_labels("labels", labels, len(images), classes_of(model, images))


def check_targets(targets: Tensor | None, labels: Tensor, classes: int) -> Tensor | None:
    if targets is None:
        return None
    targets = check_labels("targets", targets, len(labels), classes).to(labels.device)
    same = (targets == labels).nonzero()[:, 0]
    if len(same):
        first = int(same[0])
        raise ValueError(f"the target of image {first} must differ from its label, {int(labels[first])}")
    return targets


def check_epsilon(epsilon: Any, norm: str, x: Tensor) -> float:
    """Checks the size of a perturbation, which is at most the largest distance between two images."""
    largest = norms[norm].max_size(x[0].numel())
    if not is_number(epsilon) or not 0 <= epsilon <= largest:
        raise ValueError(
            f"epsilon must be a number from 0 to {largest:.4g}, since pixels are in [0, 1], not {epsilon!r}: "
            "write 8 / 255 for 8 steps of 255"
        )
    return float(epsilon)


def parse_epsilon(text: str) -> float:
    """Parses a number or a fraction such as 8/255."""
    numerator, slash, denominator = text.partition("/")
    try:
        return float(numerator) / float(denominator) if slash else float(numerator)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"epsilon must be a number or a fraction such as 8/255, not {text!r}") from None


def format_epsilon(epsilon: float, exact: bool = False) -> str:
    """The epsilon as a multiple of 1/255, such as 8/255 or 1.5/255; 0 and 1 are not changed.

    With `exact`, `parse_epsilon` returns the same number for the text, which may be a decimal such as 0.05.
    """
    steps = 255 * epsilon
    whole = abs(steps - round(steps)) < 1e-6
    text = f"{epsilon:g}" if epsilon in (0, 1) else f"{round(steps)}/255" if whole else f"{steps:.3g}/255"
    return repr(epsilon) if exact and parse_epsilon(text) != epsilon else text


@torch.no_grad()
def correct(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = BATCH) -> Tensor:
    """Whether the network classifies each image correctly, bool [N], in evaluation mode; NaN logits are wrong."""
    images, size = check_images(x), check_whole("batch_size", batch_size, 1)
    with frozen_eval(model):
        return predict_correct(model, images, check_labels_of(model, images, y), size)


@torch.no_grad()
def predict_correct(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """Like `correct`, for checked arguments and a network in evaluation mode."""
    found = [is_correct(model(x), own) for _, x, own in batches(model, images, labels, batch_size)]
    return torch.cat(found).to(images.device)


def accuracy(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = BATCH) -> float:
    """The share of images that the network classifies correctly."""
    return share(correct(model, x, y, batch_size=batch_size))


def share(right: Tensor) -> float:
    return right.double().mean().item()
