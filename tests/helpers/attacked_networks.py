"""Small networks and images for attacks."""

import torch
from torch import Tensor, nn

import dcnet
from dcnet.models.blocks import Normalized

CLASSES = 5
SHAPE = (3, 5, 5)
PIXELS = 75


def smooth(classes: int = CLASSES) -> nn.Module:
    """A smooth network in float64 that predicts all classes."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.Tanh(), nn.Linear(16, classes)).double()
    with torch.no_grad():
        network[1].weight.mul_(4)
        network[3].weight.mul_(4)
    return Normalized(network, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]).double().eval()


def images(count: int = 12, seed: int = 2) -> Tensor:
    return torch.rand(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def answers(model: nn.Module, x: Tensor) -> Tensor:
    """The predicted classes, as labels that are correct before an attack."""
    with torch.no_grad():
        return model(x).argmax(1)


def attacked(count: int = 12, classes: int = CLASSES) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = smooth(classes), images(count)
    return model, x, answers(model, x)


def linear(norms: tuple[float, ...] = (1.0, 2.0, 3.0, 0.5)) -> nn.Module:
    """Logits W x + b, for which the smallest perturbation that breaks an image is known."""
    torch.manual_seed(3)
    layer = nn.Linear(PIXELS, len(norms)).double()
    with torch.no_grad():
        layer.weight.mul_(torch.tensor(norms)[:, None])
    return nn.Sequential(nn.Flatten(), layer).eval()


def with_everything() -> nn.Module:
    """Decoupled layers, batch normalization, dropout and a frozen layer, which an attack might change."""
    torch.manual_seed(4)
    model = nn.Sequential(
        dcnet.DecoupledConv2d(3, 6, 3, padding=1, operator="tanh-cos"),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(6, 6, 3),
        nn.Flatten(),
        nn.Linear(54, CLASSES),
    )
    with torch.no_grad():
        model(torch.rand(8, *SHAPE))
    model[4].requires_grad_(False)
    return model
