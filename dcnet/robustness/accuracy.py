"""How many images a network is right about."""

import torch
from torch import Tensor, nn

from dcnet.robustness.task import (
    BATCH,
    checked_batch_size,
    checked_images,
    checked_labels,
    classes_of,
    device_of,
    on_device,
)
from dcnet.robustness.undisturbed import undisturbed


@torch.no_grad()
def correct(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = BATCH) -> Tensor:
    """Whether the network is right about each image, bool [N], in evaluation mode; logits with a NaN are wrong."""
    images = checked_images(x)
    with undisturbed(model):
        labels = checked_labels("labels", y, len(images), classes_of(model, images))
        return still_correct(model, images, labels, checked_batch_size(batch_size))


@torch.no_grad()
def still_correct(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """The same of what has been checked, with the network in evaluation mode already; bool [N] beside the images."""
    device = device_of(model, images)
    found = []
    for part, own in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        logits = model(on_device(part, device))
        right = (logits.argmax(1) == own.to(device)) & ~logits.isnan().any(1)
        found.append(right.to(images.device))
    return torch.cat(found)


def accuracy(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = BATCH) -> float:
    """The share of images that the network is right about."""
    return share(correct(model, x, y, batch_size=batch_size))


def share(right: Tensor) -> float:
    return right.double().mean().item()
