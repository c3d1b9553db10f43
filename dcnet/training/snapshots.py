"""How the features of some test images move in training: all of them at each evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.data import Dataset, FolderDataset
from dcnet.training.checkpoints import read_tensors
from dcnet.training.state import whole

NAME = "features."


@dataclass(frozen=True)
class History:
    """Features float32 [T, N, D] of N images with labels [N], and directions of classes [T, C, D], at T steps."""

    steps: Tensor
    labels: Tensor
    points: Tensor
    directions: Tensor


class Snapshots:
    """The features of the same test images, each class in proportion, whenever they are taken.

    They are part of every checkpoint, so that a run that was killed ends in the same ones.
    """

    def __init__(self, model: nn.Module, dataset: Dataset | FolderDataset, count: int, device: torch.device):
        self.model, self.network = model, _network_with_head(model)
        if isinstance(dataset, FolderDataset):
            raise ValueError(f"feature_snapshots={count} does not apply to a folder of images: omit it")
        kept = dataset.test.first(min(count, len(dataset.test)), dataset.num_classes)
        self.pixels, self.labels = kept.images.to(device).float() / 255, kept.labels.cpu()
        self.steps: list[int] = []
        self.points: list[Tensor] = []
        self.directions: list[Tensor] = []

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Keeps the features as they are after so many steps; all processes have to call this."""
        found: list[Tensor] = []
        # By a hook inside of a whole forward pass, for which networks in shares are put together.
        hook = self.network.embedding.register_forward_hook(lambda module, inputs, output: found.append(output))
        was_training = self.model.training
        self.model.eval()
        try:
            for pixels in self.pixels.split(500):
                self.model(pixels)
        finally:
            hook.remove()
            self.model.train(was_training)
        self.steps.append(step)
        self.points.append(torch.cat(found).float().cpu())
        # A copy, since training goes on with the weights.
        self.directions.append(whole(self.network.head.weight).to("cpu", torch.float32, copy=True))

    def state(self) -> dict[str, Tensor]:
        """All that was taken, as tensors by name."""
        if not self.steps:
            return {}
        kept = History(torch.tensor(self.steps), self.labels, torch.stack(self.points), torch.stack(self.directions))
        return {NAME + name: value for name, value in vars(kept).items()}

    def restore_(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from what was taken before."""
        if NAME + "steps" not in tensors:
            return
        kept = _history(tensors)
        self.steps = kept.steps.tolist()
        self.points, self.directions = list(kept.points), list(kept.directions)


def read_history(file: Path) -> History:
    """What was taken in a run; a ValueError in one sentence where the file is none of that kind."""
    tensors, _ = read_tensors(file)
    try:
        return _history(tensors)
    except KeyError:
        raise ValueError(f"{str(file)!r} has no features: it is another file of tensors") from None


def _history(tensors: dict[str, Tensor]) -> History:
    return History(**{name: tensors[NAME + name] for name in History.__dataclass_fields__})


def _network_with_head(model: nn.Module) -> Any:
    network = getattr(model, "network", model)
    if not hasattr(network, "embedding") or not hasattr(network, "head"):
        raise ValueError(f"{type(network).__name__} has no head whose features could be kept: omit feature_snapshots")
    return network
