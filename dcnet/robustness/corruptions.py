"""Corruptions of images without an attacker: noise, blur, brightness, contrast and shade, at five severities.

The levels are those of CIFAR-10-C, which has no shade; blur grows with the size of the image.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet import gradient_attack
from dcnet.checks import check_images, check_whole
from dcnet.modes import frozen_eval
from dcnet.registry import Registry
from dcnet.robustness.task import BATCH, batches, check_labels_of, predict_correct, share

SEVERITIES = (1, 2, 3, 4, 5)
# The image size for which the levels of blur are given; smaller images are not blurred less.
SIDE = 32

# Takes images [N, C, H, W], the level, the indices of the images and a seed.
Change = Callable[[Tensor, float, Tensor, int], Tensor]


@dataclass(frozen=True)
class Corruption:
    """A change of images, and its level at each severity."""

    change: Change
    levels: tuple[float, ...]


registry: Registry[Corruption] = Registry("a corruption")


def register(name: str, *levels: float) -> Callable[[Change], Change]:
    """A decorator that registers a change of images by name, with its levels for the five severities."""

    def add(change: Change) -> Change:
        if len(levels) != len(SEVERITIES):
            raise ValueError(f"a corruption needs {len(SEVERITIES)} levels, one per severity, not {len(levels)}")
        registry.add(name, Corruption(change, levels))
        return change

    return add


@register("noise", 0.04, 0.06, 0.08, 0.09, 0.10)
def _noise(images: Tensor, deviation: float, rows: Tensor, seed: int) -> Tensor:
    """Gaussian noise; every severity scales the same noise."""
    return images + deviation * gradient_attack.normal(seed, rows, images.shape[1:]).to(images.dtype)


@register("blur", 0.4, 0.6, 0.7, 0.8, 1.0)
def _blur(images: Tensor, deviation: float, rows: Tensor, seed: int) -> Tensor:
    """Gaussian blur with replicated edges."""
    deviation *= max(min(images.shape[2:]) / SIDE, 1)
    reach = math.ceil(3 * deviation)
    weights = [math.exp(-((at / deviation) ** 2) / 2) for at in range(-reach, reach + 1)]
    padded = F.pad(images, [reach] * 4, mode="replicate")
    # Sums, since a GPU may compute convolutions in TF32.
    for dim in (2, 3):
        parts = (padded.narrow(dim, at, images.shape[dim]) * weight for at, weight in enumerate(weights))
        padded = sum(parts, torch.zeros((), dtype=images.dtype, device=images.device)) / sum(weights)
    return padded


@register("brightness", 0.05, 0.1, 0.15, 0.2, 0.3)
def _brightness(images: Tensor, added: float, rows: Tensor, seed: int) -> Tensor:
    """Adds the same value to all pixels."""
    return images + added


@register("contrast", 0.75, 0.5, 0.4, 0.3, 0.15)
def _contrast(images: Tensor, kept: float, rows: Tensor, seed: int) -> Tensor:
    """Scales the differences from the mean of each channel."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + kept * (images - mean)


@register("shade", 0.8, 0.6, 0.4, 0.2, 0.05)
def _shade(images: Tensor, least: float, rows: Tensor, seed: int) -> Tensor:
    """Uneven light: a factor that falls from 1 in one corner to `least` in the opposite one, in a random direction."""
    angles = 2 * math.pi * gradient_attack.uniform(seed, rows).to(images.dtype).view(-1, 1, 1, 1)
    dtype, device = images.dtype, images.device
    down, right = (torch.linspace(-1, 1, size, dtype=dtype, device=device) for size in images.shape[2:])
    along = angles.sin() * down.view(-1, 1) + angles.cos() * right
    place = (1 + along / (angles.sin().abs() + angles.cos().abs())) / 2
    return images * (1 - (1 - least) * place)


@torch.no_grad()
def corrupt(x: Tensor, kind: str, severity: int, *, seed: int | torch.Generator = 0) -> Tensor:
    """Corrupts images [N, C, H, W]. Returns images in [0, 1], on the same device; severity is from 1 to 5."""
    images = _checked(x)
    rows = torch.arange(len(images), device=images.device)
    return _corrupt(images, registry[kind], severity, rows, gradient_attack.as_seed(seed))


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
    """Accuracies under the given kinds of corruption, by default all, at each of the five severities.

    Images are corrupted batch by batch on the device of the model; batch size and device change only the rounding.
    """
    images, size, number = _checked(x), check_whole("batch_size", batch_size, 1), gradient_attack.as_seed(seed)
    chosen = {kind: registry[kind] for kind in (registry if kinds is None else kinds)}
    with frozen_eval(model):
        labels = check_labels_of(model, images, y)

        def accuracy(corruption: Corruption, severity: int) -> float:
            right = [
                predict_correct(model, _corrupt(part, corruption, severity, rows, number), own, size)
                for rows, part, own in batches(model, images, labels, size)
            ]
            return share(torch.cat(right))

        return {kind: [accuracy(chosen[kind], severity) for severity in SEVERITIES] for kind in chosen}


def _corrupt(images: Tensor, corruption: Corruption, severity: int, rows: Tensor, seed: int) -> Tensor:
    level = corruption.levels[check_whole("severity", severity, 1, len(SEVERITIES)) - 1]
    return corruption.change(images, level, rows, seed).clamp(0, 1)


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"images must be [N, C, H, W], not {list(x.shape)}")
    return check_images(x)
