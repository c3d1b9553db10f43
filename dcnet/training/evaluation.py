"""Evaluation on a test set, and snapshots of features during training."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.data import Dataset, FolderDataset, Split
from dcnet.losses import ShardedMarginSoftmax
from dcnet.losses.margins import mean_centers
from dcnet.models.blocks import head_of_shards
from dcnet.modes import evaluating
from dcnet.training.state import whole
from dcnet.training.step import Captured, Meter, Reading, classification_loss, correct, outputs_of
from dcnet.training.tensor_files import read_tensors

Autocast = Callable[[], AbstractContextManager[object]]
EVALUATION_BATCH = 1000


class Evaluator:
    """Computes cross entropy and accuracy in evaluation mode; with `graph`, replays full batches as a CUDA graph."""

    def __init__(self, model: nn.Module, device: torch.device, autocast: Autocast = nullcontext, graph: bool = False):
        self.model, self.autocast, self.meter = model, autocast, Meter(device)
        self.head = head_of_shards(model)
        # The third batch is captured. It is a full one, even if the test set has one full and one smaller batch.
        self.add: Callable[[Tensor, Tensor], None] = Captured(self._add, warmup=2) if graph else self._add

    @torch.no_grad()
    def __call__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Reading:
        """Evaluates batches of images (bytes, or floats in [0, 1]) and labels."""
        self.meter.reset()
        with evaluating(self.model):
            for images, labels in batches:
                self.add(images, labels)
        return self.meter.read()

    def _add(self, images: Tensor, labels: Tensor) -> None:
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        if pixels.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with self.autocast():
            output = outputs_of(self.model, pixels)
        if self.head is None:
            loss, predictions = classification_loss(output, labels), output
        else:
            losses, predictions = self.head.score(output, labels)
            loss = losses.mean()
        self.meter.add(loss, correct(predictions, labels), len(labels))


def batches_of(split: Split, size: int = EVALUATION_BATCH) -> list[tuple[Tensor, Tensor]]:
    """Splits images and labels into batches."""
    return list(zip(split.images.split(size), split.labels.split(size), strict=True))


NAME = "features."


@dataclass(frozen=True)
class History:
    """Snapshots at T steps: features [T, N, D] of N images with labels [N], and class weights [T, C, D]."""

    steps: Tensor
    labels: Tensor
    points: Tensor
    directions: Tensor


class Snapshots:
    """Stores the features of a stratified subset of the test images at several steps.

    Checkpoints include the snapshots, so that a resumed run has all of them.
    """

    def __init__(self, model: nn.Module, dataset: Dataset | FolderDataset, count: int, device: torch.device):
        self.model, self.network = model, _network_with_head(model)
        if isinstance(dataset, FolderDataset):
            raise ValueError(f"feature_snapshots={count} does not apply to a folder of images: omit it")
        kept = dataset.test.subset(min(count, len(dataset.test)), dataset.num_classes)
        self.pixels, self.labels = kept.images.to(device).float() / 255, kept.labels.cpu()
        self.steps: list[int] = []
        self.points: list[Tensor] = []
        self.directions: list[Tensor] = []

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Stores the current features; all processes must call this."""
        found: list[Tensor] = []
        # Use a hook, since a sharded network is only gathered during its forward pass.
        hook = self.network.embedding.register_forward_hook(lambda module, inputs, output: found.append(output))
        with hook, evaluating(self.model):
            for pixels in self.pixels.split(500):
                self.model(pixels)
        self.steps.append(step)
        self.points.append(torch.cat(found).float().cpu())
        # A copy, since training changes the weights.
        head = self.network.head
        weight = head.full_weight() if isinstance(head, ShardedMarginSoftmax) else whole(head.weight)
        centers = mean_centers(weight, head.num_classes)
        self.directions.append(centers.to("cpu", torch.float32, copy=True))

    def state(self) -> dict[str, Tensor]:
        """Returns all snapshots as tensors by name."""
        if not self.steps:
            return {}
        kept = History(torch.tensor(self.steps), self.labels, torch.stack(self.points), torch.stack(self.directions))
        return {NAME + name: value for name, value in vars(kept).items()}

    def restore_(self, tensors: dict[str, Tensor]) -> None:
        """Loads the snapshots of a checkpoint."""
        if NAME + "steps" not in tensors:
            return
        kept = _history(tensors)
        self.steps = kept.steps.tolist()
        self.points, self.directions = list(kept.points), list(kept.directions)


def read_history(file: Path) -> History:
    """Reads the snapshots of a run; raises ValueError for any other file."""
    tensors, _ = read_tensors(file)
    try:
        return _history(tensors)
    except KeyError:
        raise ValueError(f"{str(file)!r} has no features: expected features.safetensors of a run") from None


def _history(tensors: dict[str, Tensor]) -> History:
    return History(**{name: tensors[NAME + name] for name in History.__dataclass_fields__})


def _network_with_head(model: nn.Module) -> Any:
    network = getattr(model, "network", model)
    if not hasattr(network, "embedding") or not hasattr(network, "head"):
        raise ValueError(f"{type(network).__name__} has no head with features: omit feature_snapshots")
    return network
