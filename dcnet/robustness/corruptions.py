"""What happens to images without any attacker: noise, blur, brightness and contrast, at five severities.

The levels are those of CIFAR-10-C; the blur of larger images is larger.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.robustness import draws
from dcnet.robustness.accuracy import share, still_correct
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
from dcnet.spec import unknown

SEVERITIES = (1, 2, 3, 4, 5)
# The side of the images for which the deviations of the blur are given; less than a pixel's would be none at all.
SIDE = 32

# From images [N, C, H, W], the level, the numbers of the images and a seed.
Change = Callable[[Tensor, float, Tensor, int], Tensor]


@dataclass(frozen=True)
class Corruption:
    """A change of images, and the level of it at each severity."""

    change: Change
    levels: tuple[float, float, float, float, float]


registry: dict[str, Corruption] = {}


def register(name: str, *levels: float) -> Callable[[Change], Change]:
    """A decorator that enters a change of images under its name, with its levels for the five severities."""

    def enter(change: Change) -> Change:
        if name in registry:
            raise ValueError(f"{name!r} is taken: there is a corruption of that name")
        first, second, third, fourth, fifth = levels
        registry[name] = Corruption(change, (first, second, third, fourth, fifth))
        return change

    return enter


@register("noise", 0.04, 0.06, 0.08, 0.09, 0.10)
def _noise(images: Tensor, deviation: float, rows: Tensor, seed: int) -> Tensor:
    """Gaussian noise; more of it at a higher severity, but the same."""
    return images + deviation * draws.normal(seed, rows, images.shape[1:]).to(images.dtype)


@register("blur", 0.4, 0.6, 0.7, 0.8, 1.0)
def _blur(images: Tensor, deviation: float, rows: Tensor, seed: int) -> Tensor:
    """A Gaussian mean of the pixels around, with the edge repeated beyond it."""
    deviation *= max(min(images.shape[2:]) / SIDE, 1)
    reach = math.ceil(3 * deviation)
    weights = [math.exp(-((at / deviation) ** 2) / 2) for at in range(-reach, reach + 1)]
    padded = F.pad(images, [reach] * 4, mode="replicate")
    # Sums and not convolutions, which a GPU may compute with three digits.
    for dim in (2, 3):
        parts = (padded.narrow(dim, at, images.shape[dim]) * weight for at, weight in enumerate(weights))
        padded = sum(parts, torch.zeros((), dtype=images.dtype, device=images.device)) / sum(weights)
    return padded


@register("brightness", 0.05, 0.1, 0.15, 0.2, 0.3)
def _brightness(images: Tensor, added: float, rows: Tensor, seed: int) -> Tensor:
    """All pixels brighter by the same."""
    return images + added


@register("contrast", 0.75, 0.5, 0.4, 0.3, 0.15)
def _contrast(images: Tensor, kept: float, rows: Tensor, seed: int) -> Tensor:
    """The differences from the mean of each channel, made smaller."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + kept * (images - mean)


@torch.no_grad()
def corrupt(x: Tensor, kind: str, severity: int, *, seed: int | torch.Generator = 0) -> Tensor:
    """The images [N, C, H, W] after a corruption, from 0 to 1, on their device; severity is from 1 to 5."""
    images = _checked(x)
    rows = torch.arange(len(images), device=images.device)
    return _corrupted(images, _known(kind), severity, rows, draws.as_seed(seed))


@torch.no_grad()
def accuracies(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    kinds: Sequence[str] | None = None,
    *,
    seed: int | torch.Generator = 0,
    batch_size: int = BATCH,
) -> dict[str, list[float]]:
    """The accuracies under corruptions of these kinds, or of all, at each of the five severities.

    Images are corrupted where the model is, batch by batch; but for rounding, neither the size of a batch nor the
    device changes them.
    """
    images, size, chance = _checked(x), checked_batch_size(batch_size), draws.as_seed(seed)
    chosen = {kind: _known(kind) for kind in (registry if kinds is None else kinds)}
    with undisturbed(model):
        labels = checked_labels("labels", y, len(images), classes_of(model, images))
        return {
            kind: [_accuracy(model, images, labels, corruption, severity, chance, size) for severity in SEVERITIES]
            for kind, corruption in chosen.items()
        }


def _accuracy(
    model: nn.Module, x: Tensor, labels: Tensor, corruption: Corruption, severity: int, seed: int, batch_size: int
) -> float:
    device, right = device_of(model, x), []
    for rows in torch.arange(len(x), device="cpu").split(batch_size):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        images = _corrupted(on_device(x[part], device), corruption, severity, rows.to(device), seed)
        right.append(still_correct(model, images, labels[part], batch_size))
    return share(torch.cat(right))


def _corrupted(images: Tensor, corruption: Corruption, severity: int, rows: Tensor, seed: int) -> Tensor:
    # True and 1.0 equal 1, and are none of them.
    if type(severity) is not int or severity not in SEVERITIES:
        raise ValueError(f"severity must be a whole number from 1 to 5, not {severity!r}")
    return corruption.change(images, corruption.levels[severity - 1], rows, seed).clamp(0, 1)


def _known(kind: str) -> Corruption:
    if kind not in registry:
        raise unknown("corruption", kind, registry)
    return registry[kind]


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"images must be [N, C, H, W], not {list(x.shape)}")
    return checked_images(x)
