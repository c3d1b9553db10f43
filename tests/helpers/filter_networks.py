"""Small networks, and functions for their filters."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcnet

BOTH = ["gradient", "update"]


def network(operator="tanh(radius=2.0)-cos", eps=1e-4):
    """A network whose 5, 1 and 3 filters cannot be divided evenly between two processes."""
    options = {"eps": eps, "dtype": torch.float64}
    return nn.Sequential(
        dcnet.DecoupledConv2d(2, 5, 3, operator=operator, **options),
        dcnet.DecoupledConv2d(5, 1, 1, operator=operator, **options),
        nn.Flatten(),
        nn.Linear(9, 6, dtype=torch.float64),
        dcnet.DecoupledLinear(6, 3, operator="linear-cos", **options),
    )


def examples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 2, 5, 5, generator=generator, dtype=torch.float64)


class Tokens(nn.Module):
    """A layer of a transformer without attention, checkpointed, and one filter; radii are learned and relative."""

    def __init__(self):
        super().__init__()
        options = {"operator": "tanh-cos", "dtype": torch.float64}
        self.norm, self.activation = nn.LayerNorm(6, dtype=torch.float64), nn.GELU()
        self.first, self.second = dcnet.DecoupledLinear(6, 8, **options), dcnet.DecoupledLinear(8, 6, **options)
        self.last = dcnet.DecoupledLinear(6, 1, **options)

    def forward(self, x):
        return self.last(x + checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x):
        return self.second(self.activation(self.first(self.norm(x))))


def tokens():
    """Tokens with 6 features."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 5, 6, generator=generator, dtype=torch.float64)


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def scale_filters(model, factor):
    with torch.no_grad():
        for layer in decoupled(model):
            layer.weight.mul_(factor)
    return model


def decoupled(model):
    return [layer for layer in model.modules() if isinstance(layer, dcnet.layers.Decoupled)]


def unit(v):
    return v / v.norm()


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value
