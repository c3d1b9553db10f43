"""The naive formulation of every kind of decoupled layer: norms by a sum, a division, then h and g."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dcnet.attention import DecoupledAttention, default_scale
from dcnet.layers import Decoupled, DecoupledLinear
from dcnet.operator import Operator
from dcnet.parameters import Value

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def naive_output(layer: nn.Module, *inputs: Tensor) -> Tensor:
    """The output of a decoupled layer in training by the naive formulation; of any other module, its own output."""
    if isinstance(layer, DecoupledAttention):
        return naive_attention(layer, *inputs)
    if isinstance(layer, DecoupledLinear):
        return naive_linear(layer, *inputs)
    if isinstance(layer, Decoupled):
        return naive_conv(layer, *inputs)
    output: Tensor = layer(*inputs)
    return output


def naive_conv(layer: Decoupled, x: Tensor) -> Tensor:
    """A convolution as the authors wrote it: a convolution with ones for the norms, a division, h and g.

    Supports zero padding and no bias; the running mean norm is not updated.
    """
    assert isinstance(layer, _ConvNd)
    spatial, groups = len(layer.kernel_size), layer.groups
    convolve: Any = CONVOLUTIONS[spatial]
    window: Any = (layer.stride, layer.padding, layer.dilation)
    ones = torch.ones_like(layer.weight[:groups])
    n = (convolve(x * x, ones, None, *window, groups) + layer.eps).sqrt()
    mean, n = n.mean(), n.repeat_interleave(layer.out_channels // groups, 1) if groups > 1 else n
    shape = (-1, *[1] * spatial)
    w_norm = (layer.weight.square().flatten(1).sum(1) + layer.eps).sqrt().view(shape)
    cos = convolve(x, layer.weight, None, *window, groups) / (n * w_norm)
    return _value(layer, cos, w_norm, n, mean, shape)


def naive_linear(layer: DecoupledLinear, x: Tensor) -> Tensor:
    """A linear layer by the norm of every row, a division, h and g."""
    n = (x.square().sum(-1, keepdim=True) + layer.eps).sqrt()
    w_norm = (layer.weight.square().sum(1) + layer.eps).sqrt()
    cos = F.linear(x, layer.weight) / (n * w_norm)
    output = _value(layer, cos, w_norm, n, n.mean(), (-1,))
    return output if layer.bias is None else output + layer.bias


def naive_attention(layer: DecoupledAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by the matrix of all scores: cosines, h and g, softmax, times the values."""
    op, constants = layer.operator, _per_filter(layer.operator, layer.constants(), (-1, 1, 1))
    n, k_norm = ((one.square().sum(-1, keepdim=True) + layer.eps).sqrt() for one in (query, key))
    cos = (query @ key.mT) / (n * k_norm.mT)
    scores = op.h(op.weighting.argument(k_norm.mT, n), constants) * op.g(cos, constants)
    scale = default_scale(op, query.shape[-1]) if layer.fixed_scale is None else layer.fixed_scale
    return (scale * scores * op.factor(k_norm.mT, constants)).softmax(-1) @ value


def _value(layer: Decoupled, cos: Tensor, w_norm: Tensor, n: Tensor, mean: Tensor, shape: tuple[int, ...]) -> Tensor:
    """f(w, x) of cosines and norms; relative constants are multiplied by the mean norm where ||x|| enters."""
    op = layer.operator
    of_filters = _per_filter(op, layer.constants(), shape)
    of_patches = {name: value * mean if op.slots[name].relative else value for name, value in of_filters.items()}
    factor = op.factor(w_norm, of_filters)
    return factor * op.h(op.weighting.argument(w_norm, n), of_patches) * op.g(cos, of_filters)


def _per_filter(op: Operator, constants: dict[str, Value], shape: tuple[int, ...]) -> dict[str, Value]:
    return {
        name: value.view(shape) if isinstance(value, Tensor) and op.slots[name].per_channel else value
        for name, value in constants.items()
    }
