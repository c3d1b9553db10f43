"""A network that takes pixels as they are, from 0 to 1."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalized(nn.Module):
    """network((x - mean) / std): the normalisation goes wherever the network goes, and attacks act on pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, input: Tensor, *labels: Tensor) -> Tensor:
        """What the network gives; one with a head of its own takes labels as well."""
        return self.network(self.normalize(input), *labels)

    def normalize(self, input: Tensor) -> Tensor:
        return (input - self.mean) / self.std

    def features(self, input: Tensor) -> Tensor:
        """What the classifier of the network sees."""
        return self.network.features(self.normalize(input))  # type: ignore[operator]
