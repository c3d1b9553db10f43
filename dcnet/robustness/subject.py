"""The subject of a report card: a network, images, the budget and the strength of the attacks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.checks import check_images, check_whole
from dcnet.gradient_attack import as_seed
from dcnet.modes import frozen_eval
from dcnet.robustness.attacks import check_source, perturb
from dcnet.robustness.task import BATCH, accuracy, check_epsilon, check_labels_of, predict_correct, share

# A network whose accuracy is higher by this share on another range of pixels expects that range.
OTHER_RANGE = 0.2


@dataclass(frozen=True)
class Effort:
    """How strong the attacks are.

    Args:
        steps: steps of PGD.
        restarts: restarts of PGD.
        bim_steps: steps of BIM.
        queries: queries of Square as the black-box attack.
        autoattack: whether to run AutoAttack.
        autoattack_queries: queries of Square within AutoAttack; 5,000 in the standard version.
    """

    steps: int = 50
    restarts: int = 5
    bim_steps: int = 10
    queries: int = 1000
    autoattack: bool = True
    autoattack_queries: int = 5000


STANDARD = Effort()
# Quick attacks, in a hundredth of the time.
QUICK = Effort(steps=10, restarts=1, queries=100, autoattack=False)


@dataclass(frozen=True)
class Subject:
    """A network under attack, where each pixel may change by at most epsilon.

    Args:
        model: maps pixels in [0, 1] to logits [N, classes].
        images: uint8, or float in [0, 1], [N, C, H, W].
        labels: int [N].
        epsilon: the largest change of a pixel, in (0, 1].
        source: another network for the same classes, from which attacks are transferred.
        effort: how strong the attacks are.
        seed: for all random numbers.
        batch_size: images attacked at once.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    epsilon: float = 8 / 255
    source: nn.Module | None = None
    effort: Effort = STANDARD
    seed: int = 0
    batch_size: int = BATCH

    def __post_init__(self) -> None:
        if check_epsilon(self.epsilon, "linf", self.images) == 0:
            raise ValueError("epsilon must be above 0, not 0: such an attack changes nothing")
        images = check_images(self.images)
        with frozen_eval(self.model):
            labels = check_labels_of(self.model, images, self.labels)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels.to(images.device))
        as_seed(self.seed)
        check_whole("batch_size", self.batch_size, 1)
        if self.source is not None:
            check_source(self.model, self.source, images)

    def options(self) -> dict[str, Any]:
        """Keyword arguments that all attacks get."""
        return {"seed": self.seed, "batch_size": self.batch_size}

    def accuracy(self, images: Tensor | None = None) -> float:
        """The accuracy on these images, by default the clean ones."""
        return accuracy(self.model, self.images if images is None else images, self.labels, batch_size=self.batch_size)

    def under(self, attack: str, *, source: nn.Module | None = None, **settings: Any) -> float:
        """The accuracy under an attack."""
        options = {"epsilon": self.epsilon, "source": source, **self.options(), **settings}
        return self.accuracy(perturb(self.model, self.images, self.labels, attack, **options))


@torch.no_grad()
def check_pixels(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = BATCH) -> None:
    """Raises ValueError for a network with a clearly higher accuracy on another range of pixels than [0, 1]."""
    pixels = check_images(images)
    dims = [0, *range(2, pixels.dim())]
    mean, std = pixels.mean(dims, keepdim=True), pixels.std(dims, keepdim=True)
    others = {
        "from 0 to 255": 255 * pixels,
        "from -1 to 1": 2 * pixels - 1,
        "with mean 0 and deviation 1": (pixels - mean) / std.clamp(min=1e-6),
    }
    with frozen_eval(model):
        own, *found = (
            share(predict_correct(model, moved, labels.to(pixels.device), batch_size))
            for moved in (pixels, *others.values())
        )
    best = max(found)
    if best > own + OTHER_RANGE:
        raise ValueError(
            f"the network takes pixels {list(others)[found.index(best)]}, not from 0 to 1: its accuracy is "
            f"{100 * best:.0f} % instead of {100 * own:.0f} % with them; normalize inside the network, as "
            "dcnet.models.blocks.Normalized does"
        )
