"""What training makes small."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dcnet import regularizers
from dcnet.training.adversaries import as_adversary
from dcnet.training.adversary import Target
from dcnet.training.config import RunConfig


def classification_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, log_floor: float = 0.0) -> Tensor:
    """The mean of -sum_j y_j log(softmax(logits)_j + floor), with y smoothed towards equal shares for all classes."""
    if log_floor == 0:
        return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
    logs = (logits.float().softmax(1) + log_floor).log()
    target = logs.gather(1, labels[:, None]).squeeze(1)
    return -((1 - smoothing) * target + smoothing * logs.mean(1)).mean()


Call = Callable[..., Any]


class Objective:
    """The loss of a batch, and what the filters are held to."""

    def __init__(self, config: RunConfig, model: nn.Module, compiled: bool = False):
        self.config, self.model = config, model
        measure = regularizers.orthonormal_of
        # As it is, it is some two hundred small kernels in a step, each of which takes as long as its launch.
        self.orthonormal: Call = torch.compile(measure, dynamic=False) if compiled else measure
        self.adversary = None if config.adversary is None else as_adversary(config.adversary)

    def loss(self, network: Call, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss as it is reported, and the logits; of images that an adversary changed, where there is one."""
        if self.adversary is None:
            return self._plain_loss(network, images, labels)
        # Around its gradients alone, what joins those of several processes would wait for the others in vain.
        joins = isinstance(network, DistributedDataParallel)
        target = Target(network, self.model if joins else network, self.model)
        return self.adversary.loss(self._plain_loss, target, images, labels)

    def _plain_loss(self, network: Call, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A network with a head has its own loss."""
        if self.config.margin is not None:
            return network(images, labels)
        logits = network(images)
        return classification_loss(logits, labels, self.config.label_smoothing, self.config.log_floor), logits

    def constraint(self) -> Tensor | float:
        """The part that does not depend on the batch."""
        if self.config.orthonormal == 0:
            return 0.0
        # Outside of what is compiled, which would have to guard every module, and to gather what is sharded.
        filters = regularizers.filters_of(self.model)
        return 0.5 * self.config.orthonormal * self.orthonormal(filters)


@torch.no_grad()
def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many are classified as they should be."""
    return (logits.argmax(1) == labels).sum()
