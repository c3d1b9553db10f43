"""The equation as one would write it down: what the care that the layers take is to be compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.layers import DecoupledConv2d


def naive_conv2d(layer: DecoupledConv2d, x: Tensor) -> Tensor:
    """f(w, x) of a layer in training, the authors' way: a convolution with ones for the norm, a division, h and g.

    For one group, zero padding and no bias. The running mean norm is not updated.
    """
    op = layer.operator
    window: Any = (layer.stride, layer.padding, layer.dilation)
    n = (F.conv2d(x * x, torch.ones_like(layer.weight[:1]), None, *window) + layer.eps).sqrt()
    w_norm = (layer.weight.square().sum((1, 2, 3)) + layer.eps).sqrt().view(-1, 1, 1)
    cos = F.conv2d(x, layer.weight, None, *window) / (n * w_norm)
    of_filters = {
        name: value.view(-1, 1, 1) if isinstance(value, Tensor) and op.slots[name].per_channel else value
        for name, value in layer.constants().items()
    }
    mean = n.mean()
    of_patches = {name: value * mean if op.slots[name].relative else value for name, value in of_filters.items()}
    factor = op.weighting.factor(w_norm, lambda norm: op.h(norm, of_filters), op.alpha(of_filters))
    return factor * op.h(op.weighting.argument(w_norm, n), of_patches) * op.g(cos, of_filters)
