"""Networks for report cards: one with usable gradients, and two that mask theirs."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.subject import Effort, Subject
from helpers.attacked_networks import PIXELS, images

EFFORT = Effort(steps=6, restarts=1, bim_steps=4, queries=30, autoattack=False)
CLASSES = 4


class Hidden(nn.Module):
    """A network whose gradient is masked, by rounding of the input or by large logits."""

    def __init__(self, network: nn.Module, way: str):
        super().__init__()
        self.network, self.way = network, way

    def forward(self, input: Tensor) -> Tensor:
        if self.way == "rounding":
            return self.network((input * 64).round() / 64)
        return self.network(input) * 1e4


def honest(seed: int = 5) -> nn.Module:
    """A small network in float32 with small margins."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, CLASSES, bias=False))
    with torch.no_grad():
        network[1].bias.copy_(-network[1].weight.sum(1) / 2)
        network[3].weight.mul_(4)
    return network.eval()


def subject(model: nn.Module | None = None, count: int = 40, **options: Any) -> Subject:
    """The network, with images that it classifies correctly except one."""
    model = honest() if model is None else model
    x = images(count).float()
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    return Subject(model, x, y, **{"epsilon": 0.05, "effort": EFFORT, **options})
