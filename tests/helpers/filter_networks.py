"""Small networks, and functions for their filters."""

import torch
from torch import nn

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
