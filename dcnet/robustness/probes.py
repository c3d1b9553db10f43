"""What the gradient of a network with respect to its images is like, and the loss along it."""

import math
from typing import Any

import torch
from torch import Tensor

from dcnet.robustness import draws
from dcnet.robustness.goal import Goal, cross_entropy
from dcnet.robustness.subject import Subject
from dcnet.robustness.task import device_of, on_device
from dcnet.robustness.undisturbed import undisturbed

# Images whose loss is followed, and the amounts by which they are moved, in epsilons.
FOLLOWED = 200
AMOUNTS = [at / 4 for at in range(-8, 9)]
Measured = dict[str, Any]


@torch.inference_mode(False)
@torch.no_grad()
def gradients(subject: Subject) -> Measured:
    """The share of images that the network is right about whose gradient, as attacks see it, is zero in all pixels.

    Where it is right about none, all count. What is not a number counts as zero, since attacks cannot follow it.
    """
    with undisturbed(subject.model):
        found = [_of_batch(subject, part) for part in _parts(subject, len(subject.images))]
    right, zero = (torch.cat(values) for values in zip(*found, strict=True))
    counted = zero[right] if right.any() else zero
    return {
        "images": len(counted),
        "zero": (counted == 1).double().mean().item(),
        "zero_pixels": counted.mean().item(),
    }


def _of_batch(subject: Subject, part: slice) -> tuple[Tensor, Tensor]:
    """Whether the network is right about each image, and the share of its pixels that have no gradient."""
    device = device_of(subject.model, subject.images)
    images, labels = on_device(subject.images[part], device), subject.labels[part].to(device)
    gradient, _, broken = Goal(subject.model, cross_entropy).gradient(images, labels)
    return ~broken.cpu(), (gradient.flatten(1) == 0).double().mean(1).cpu()


@torch.inference_mode(False)
@torch.no_grad()
def surface(subject: Subject) -> Measured:
    """The mean loss along the sign of the gradient and along random signs, within two epsilons of the images.

    Images are moved by the amounts, and what leaves 0 to 1 is cut off, as an attack has to.
    """
    count = min(FOLLOWED, len(subject.images))
    reach = min(subject.epsilon, 0.5)
    amounts = [reach * at for at in AMOUNTS]
    sums = {"gradient": [0.0] * len(amounts), "random": [0.0] * len(amounts)}
    with undisturbed(subject.model):
        goal = Goal(subject.model, cross_entropy)
        for part in _parts(subject, count):
            _add_losses(subject, goal, part, amounts, sums)
    means = {name: [_number(total / count) for total in totals] for name, totals in sums.items()}
    return {"images": count, "amounts": amounts, "epsilon": reach, **means}


def _add_losses(subject: Subject, goal: Goal, part: slice, amounts: list[float], sums: dict[str, list[float]]) -> None:
    device = device_of(subject.model, subject.images)
    images, labels = on_device(subject.images[part], device), subject.labels[part].to(device)
    rows = torch.arange(part.start, part.stop, device=device)
    # Another seed than that of the starts of attacks.
    chance = draws.uniform(subject.seed + 1, rows, images.shape[1:]).to(images.dtype)
    directions = {
        "gradient": goal.gradient(images, labels)[0].sign(),
        "random": torch.where(chance < 0.5, -1.0, 1.0).to(images.dtype),
    }
    for name, direction in directions.items():
        for at, amount in enumerate(amounts):
            loss, _ = goal.judged((images + amount * direction).clamp(0, 1), labels)
            sums[name][at] += float(loss.double().sum())


def _parts(subject: Subject, count: int) -> list[slice]:
    size = subject.batch_size
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _number(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else None
