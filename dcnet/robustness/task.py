"""What is attacked: a network, images, labels and a budget, all of them checked."""

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.draws import as_seed
from dcnet.robustness.norms import as_norm
from dcnet.verification.embeddings import SLACK

BATCH = 500


@dataclass(frozen=True)
class Task:
    """Images [N, ...] from 0 to 1 that a network is to be wrong about.

    Args:
        model: in evaluation mode, from pixels to logits [N, classes].
        x: the images; they stay where they are, and go to the model batch by batch.
        labels: what they show, int64 [N].
        targets: what they are to be taken for, int64 [N]; None for anything but the label.
        epsilon: how large a perturbation may be, in the norm of the attack.
        seed: of all chance.
        batch_size: how many images are attacked at once.
        compiled: whether the step of the attack is compiled.
        classes: how many the model knows.
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

    @property
    def wanted(self) -> Tensor:
        """What the attack looks at: the targets, or the labels that it leads away from."""
        return self.labels if self.targets is None else self.targets

    @property
    def device(self) -> torch.device:
        return device_of(self.model, self.x)

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The numbers of images, the images and what is wanted of them, batch by batch on the device of the model."""
        for rows in torch.arange(len(self.x), device="cpu").split(self.batch_size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            wanted = self.wanted[part].to(self.device)
            yield rows.to(self.device), on_device(self.x[part], self.device), wanted


def device_of(model: nn.Module, x: Tensor) -> torch.device:
    """Where the model is; one without parameters and buffers is where the images are."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), x.device)


def on_device(images: Tensor, device: torch.device) -> Tensor:
    """Images on the device, with channels last where that is faster."""
    images = images.to(device)
    fast = images.is_cuda and images.dim() == 4
    return images.contiguous(memory_format=torch.channels_last) if fast else images


def checked_epsilon(epsilon: Any, norm: str, x: Tensor) -> float:
    largest = as_norm(norm).largest(x[0].numel())
    number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
    if not number or not 0 <= epsilon <= largest:
        raise ValueError(
            f"epsilon must be a number from 0 to {largest:.4g}, since pixels are from 0 to 1, not {epsilon!r}: "
            "write 8 / 255 for 8 steps of 255"
        )
    return float(epsilon)


def check_tensor(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, not a {type(value).__name__}: give torch.as_tensor({what})")


def checked_images(x: Tensor) -> Tensor:
    """The images in float32, or in float64 if they are, from 0 to 1; bytes count as pixels."""
    check_tensor("images", x)
    if x.dim() < 2:
        raise ValueError(f"images must be [N, ...], not {list(x.shape)}")
    if not x.numel():
        raise ValueError(f"there are no images: expected [N, ...] with one image or more, not {list(x.shape)}")
    pixels = x / 255 if x.dtype == torch.uint8 else x if x.dtype == torch.float64 else x.float()
    low, high = (float(end) for end in pixels.aminmax())
    if math.isnan(low + high):
        bad = pixels.flatten(1).isnan().any(1).nonzero()[:, 0]
        raise ValueError(f"image {int(bad[0])} has a pixel that is NaN, and so have {len(bad)} of {len(x)} in all")
    if low < -SLACK or high > 1 + SLACK:
        raise ValueError(
            f"images must be uint8, or float from 0 to 1, not {x.dtype} from {low:g} to {high:g}: the normalisation "
            "belongs into the model, as in dcnet.models.normalized.Normalized"
        )
    return pixels.clamp(0, 1)


def checked_labels(what: str, labels: Tensor, count: int, classes: int) -> Tensor:
    check_tensor(what, labels)
    if labels.shape != (count,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{what} must be integers [{count}], one an image, not {labels.dtype} {list(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{what} must be from 0 to {classes - 1}, since the network has {classes} classes, not "
            f"{low if low < 0 else high}"
        )
    # A copy, since a tensor of inference mode cannot take part in a gradient.
    return labels.long().clone()


def checked_targets(targets: Tensor | None, labels: Tensor, classes: int) -> Tensor | None:
    if targets is None:
        return None
    targets = checked_labels("targets", targets, len(labels), classes).to(labels.device)
    same = (targets == labels).nonzero()[:, 0]
    if len(same):
        first = int(same[0])
        raise ValueError(f"the target of image {first} must be another class than its label, {int(labels[first])}")
    return targets


def classes_of(model: nn.Module, x: Tensor) -> int:
    """How many logits the model, in evaluation mode, gives for an image."""
    with torch.no_grad():
        logits = model(on_device(x[:1], device_of(model, x)))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 1:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"{type(model).__name__} must give logits [N, classes], and gives {found} for one image")
    return logits.shape[1]


def checked_batch_size(batch_size: Any) -> int:
    whole = isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool)
    if not whole or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
    return int(batch_size)


def make_task(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str,
    epsilon: float,
    targets: Tensor | None,
    seed: int | torch.Generator,
    batch_size: int,
    compiled: bool,
) -> Task:
    """The task, or a ValueError of one sentence."""
    images = checked_images(x)
    budget = checked_epsilon(epsilon, norm, images)
    batch_size = checked_batch_size(batch_size)
    classes = classes_of(model, images)
    labels = checked_labels("labels", y, len(x), classes)
    aims = checked_targets(targets, labels, classes)
    return Task(model, images, labels, aims, budget, as_seed(seed), batch_size, compiled, classes)
