"""Certificates of networks: from their layers, and from images if there are some."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from dcnet.robustness.accuracy import share
from dcnet.robustness.certificate import Certificate
from dcnet.robustness.lipschitz import check_shape, signal_of
from dcnet.robustness.task import (
    BATCH,
    checked_batch_size,
    checked_epsilon,
    checked_images,
    checked_labels,
    classes_of,
    device_of,
    on_device,
)
from dcnet.robustness.undisturbed import undisturbed


def certify(
    model: nn.Module,
    epsilon: float,
    norm: str = "linf",
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    *,
    x: Tensor | None = None,
    y: Tensor | None = None,
    batch_size: int = BATCH,
) -> Certificate:
    """An upper bound on how far a perturbation of size epsilon can move the logits of any image, in evaluation mode.

    It is the smaller of two: epsilon times a Lipschitz constant of the network, and the width of the box that bounded
    operators keep the logits in. Both hold in exact arithmetic: what float32 rounds comes on top.

    Args:
        model: from pixels to logits [N, classes], of the layers that dcnet.robustness.bounds has a rule for.
        epsilon: of the perturbation.
        norm: "linf" or "l2".
        image_size: side of the images, or height and width; that of x if images are given.
        channels: of the images, likewise.
        x: images [N, channels, height, width] from 0 to 1, or uint8.
        y: their labels, int [N]; with x, the certificate says how many of them it holds for.
        batch_size: how many of them go through the network at once.
    """
    if (x is None) != (y is None):
        raise ValueError("images and labels come together: give both x and y, or neither")
    images = None if x is None else checked_images(x)
    shape = _shape(image_size, channels, images)
    size = checked_epsilon(epsilon, norm, torch.empty(1, *shape, device="meta"))
    signal = signal_of(model, shape, norm)
    if len(signal.shape) != 1 or signal.channels < 2:
        raise ValueError(f"{type(model).__name__} must give two logits or more, and gives {list(signal.shape)}")
    lipschitz, spread = signal.pair_bounds()
    bounds = Certificate(size, norm, lipschitz, spread, signal.low, signal.high)
    if images is None or y is None:
        return bounds
    return _with_images(model, bounds, images, y, batch_size)


def _shape(image_size: int | tuple[int, int] | None, channels: int, images: Tensor | None) -> tuple[int, ...]:
    """The shape of an image, from the images if there are some."""
    sides = tuple(image_size) if isinstance(image_size, tuple | list) else (image_size, image_size)
    if images is not None:
        if image_size is not None and sides != images.shape[2:]:
            raise ValueError(f"the images are {list(images.shape[1:])}, not of image_size={image_size!r}: leave it out")
        return tuple(images.shape[1:])
    if image_size is None:
        raise ValueError("image_size is missing: give the side of the images that the network is made for, such as 32")
    check_shape(shape := (channels, *sides))
    return shape


@torch.no_grad()
def _with_images(model: nn.Module, bounds: Certificate, images: Tensor, y: Tensor, batch_size: int) -> Certificate:
    size, device, found = checked_batch_size(batch_size), device_of(model, images), []
    with undisturbed(model):
        labels = checked_labels("labels", y, len(images), classes_of(model, images))
        for part, own in zip(images.split(size), labels.split(size), strict=True):
            found.append(_shares(model(on_device(part, device)).double(), own.to(device), bounds))
    factors, per_epsilon, right = torch.cat(found, 1)
    return dataclasses.replace(
        bounds,
        images=len(images),
        accuracy=share(right),
        certified=share(factors < 1),
        factor=float(factors.min()) if right.any() else None,
        reach=_inverse(float(per_epsilon.min())) if right.any() else None,
    )


def _shares(logits: Tensor, labels: Tensor, bounds: Certificate) -> Tensor:
    """What is moved over the margin, within epsilon and for each 1 of it, inf where the network is wrong; and whether
    it is right, since a bound may be infinite, too; [3, N].
    """
    margins = logits.gather(1, labels[:, None]) - logits
    own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    moved = torch.stack((bounds.movement, bounds.lipschitz))[:, labels]
    # Not `margins <= 0`, since a NaN is wrong, too.
    shares = torch.where(margins > 0, moved / margins, math.inf)
    right = ((margins > 0) | own).all(1)
    return torch.cat((torch.where(own, 0.0, shares).amax(2), right[None]))


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf
