"""Who is attacked for a report card, by what budget, and how hard."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.accuracy import accuracy, share, still_correct
from dcnet.robustness.draws import as_seed
from dcnet.robustness.perturbing import check_source, perturb
from dcnet.robustness.task import BATCH, checked_batch_size, checked_epsilon, checked_images, checked_labels, classes_of
from dcnet.robustness.undisturbed import undisturbed

# By how much a network must do better on images of another range to be taken for one that wants that range.
MISTAKEN = 0.2


@dataclass(frozen=True)
class Effort:
    """How hard a network is attacked.

    Args:
        steps: of PGD.
        restarts: of PGD.
        bim_steps: of BIM.
        queries: of Square, where it stands for the black box.
        autoattack: whether AutoAttack is part of it.
        autoattack_queries: of the Square that is a part of AutoAttack; 5,000 in the standard version.
    """

    steps: int = 50
    restarts: int = 5
    bim_steps: int = 10
    queries: int = 1000
    autoattack: bool = True
    autoattack_queries: int = 5000


STANDARD = Effort()
# For a first look, in a hundredth of the time.
QUICK = Effort(steps=10, restarts=1, queries=100, autoattack=False)


@dataclass(frozen=True)
class Subject:
    """A network under attack, by changes of each pixel of at most epsilon.

    Args:
        model: from pixels, 0 to 1, to logits [N, classes].
        images: uint8, or float from 0 to 1, [N, C, H, W].
        labels: int [N].
        epsilon: above 0, and at most 1.
        source: another network for the same classes, from which attacks are transferred.
        effort: how hard.
        seed: of all chance.
        batch_size: how many images are attacked at once.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    epsilon: float = 8 / 255
    source: nn.Module | None = None
    effort: Effort = field(default_factory=Effort)
    seed: int = 0
    batch_size: int = BATCH

    def __post_init__(self) -> None:
        if checked_epsilon(self.epsilon, "linf", self.images) == 0:
            raise ValueError("epsilon must be above 0: with 0 nothing is attacked")
        images = checked_images(self.images)
        with undisturbed(self.model):
            labels = checked_labels("labels", self.labels, len(images), classes_of(self.model, images))
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels.to(images.device))
        as_seed(self.seed)
        checked_batch_size(self.batch_size)
        if self.source is not None:
            check_source(self.model, self.source, images)

    def options(self) -> dict[str, Any]:
        """What every attack is told."""
        return {"seed": self.seed, "batch_size": self.batch_size}

    def accuracy(self, images: Tensor | None = None) -> float:
        """The share of these images, or of those that nobody has touched, that the network is right about."""
        return accuracy(self.model, self.images if images is None else images, self.labels, batch_size=self.batch_size)

    def under(self, attack: str, *, source: nn.Module | None = None, **settings: Any) -> float:
        """The accuracy that an attack leaves."""
        found = perturb(
            self.model,
            self.images,
            self.labels,
            attack,
            epsilon=self.epsilon,
            source=source,
            **self.options(),
            **settings,
        )
        return self.accuracy(found)


@torch.no_grad()
def check_pixels(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = BATCH) -> None:
    """Refuses a network that does clearly better on images of another range than from 0 to 1."""
    pixels = checked_images(images)
    dims = [0, *range(2, pixels.dim())]
    centre, spread = pixels.mean(dims, keepdim=True), pixels.std(dims, keepdim=True)
    others = {
        "from 0 to 255": 255 * pixels,
        "from -1 to 1": 2 * pixels - 1,
        "with mean 0 and deviation 1": (pixels - centre) / spread.clamp(min=1e-6),
    }
    with undisturbed(model):
        own, *found = (
            share(still_correct(model, moved, labels.to(pixels.device), batch_size))
            for moved in (pixels, *others.values())
        )
    best = max(found)
    if best > own + MISTAKEN:
        raise ValueError(
            f"the network takes pixels {list(others)[found.index(best)]}, not from 0 to 1: it is right about "
            f"{100 * best:.0f} % of those, and {100 * own:.0f} % of these; the normalisation belongs into the network, "
            "as in dcnet.models.normalized.Normalized"
        )
