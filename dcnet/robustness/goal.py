"""What an attack makes large, and when an image counts as broken."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)_y, [N]."""
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} logits_j - logits_y, [N]: its gradient does not vanish where the network is sure."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own.squeeze(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}


@dataclass(frozen=True)
class Goal:
    """Away from the labels, or towards them if they are targets.

    Args:
        network: from images to logits.
        loss: of logits and labels, image by image; it falls as the label becomes likelier.
        targeted: whether the labels are what the images are to be taken for.
    """

    network: Callable[[Tensor], Tensor]
    loss: Loss
    targeted: bool = False

    def judged(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The score [N], which is the larger the nearer an image is to the goal, and whether it is there, bool [N].

        Logits with a NaN are wrong, as they are for `accuracy`: away from the label, and at no target.
        """
        logits = self.network(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # A NaN is no answer, whatever class it stands at.
        hit = (logits.argmax(1) == labels) & ~logits.isnan().any(1)
        loss = self.loss(logits, labels)
        return (-loss, hit) if self.targeted else (loss, ~hit)

    def gradient(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the score with respect to each image, the score, and whether it is there."""
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            score, broken = self.judged(images, labels)
            if not score.requires_grad:
                raise ValueError(
                    "the logits have no gradient with respect to the images: use an attack that needs none, such as "
                    "square, or transfer from another network"
                )
            (gradient,) = torch.autograd.grad(score.sum(), images)
        # One NaN would make the whole image NaN; without it the other pixels are still moved.
        return gradient.nan_to_num(), score.detach(), broken
