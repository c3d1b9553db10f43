"""Activations of fused blocks: their codes in the kernels, and their equations and slopes in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.device_functions import Block, at_least, at_most, constexpr, device_function, tl

# Codes that kernels compare with these numbers.
NO_ACTIVATION, RELU, PRELU, RELU6, SILU, HARDSWISH = range(6)

CODES: dict[type[nn.Module], int] = {
    nn.ReLU: RELU,
    nn.PReLU: PRELU,
    nn.ReLU6: RELU6,
    nn.SiLU: SILU,
    nn.Hardswish: HARDSWISH,
}
# All but PReLU, which has slopes.
FUNCTIONS: dict[int, Callable[[Tensor], Tensor]] = {
    RELU: torch.relu,
    RELU6: F.relu6,
    SILU: F.silu,
    HARDSWISH: F.hardswish,
}


def code_of(activation: nn.Module | None) -> int:
    """The code of a module of one of these classes, or of None."""
    return NO_ACTIVATION if activation is None else CODES[type(activation)]


def follows_residual(activation: nn.Module | None) -> bool:
    """Whether a block may add a residual before the activation: the backward pass has only the sign of its input."""
    return activation is None or type(activation) is nn.ReLU


@device_function
def activated(v: Block, slope: Block, ACTIVATION: constexpr) -> Block:
    """The activation of v; `slope` is that of PReLU."""
    if ACTIVATION == 1:
        x = at_least(v, 0.0)
    elif ACTIVATION == 2:
        x = tl.where(v > 0, v, slope * v)
    elif ACTIVATION == 3:
        x = at_most(at_least(v, 0.0), 6.0)
    elif ACTIVATION == 4:
        x = v * tl.sigmoid(v)
    elif ACTIVATION == 5:
        x = v * at_most(at_least(v + 3, 0.0), 6.0) * (1 / 6)
    else:
        x = v
    return x


@device_function
def through_activation(d: Block, v: Block, slope: Block, ACTIVATION: constexpr) -> Block:
    """The gradient of v, from the gradient d of the activation of v."""
    if ACTIVATION == 1:
        inner = tl.where(v > 0, d, 0.0)
    elif ACTIVATION == 2:
        inner = tl.where(v > 0, d, slope * d)
    elif ACTIVATION == 3:
        inner = tl.where((v > 0) & (v < 6), d, 0.0)
    elif ACTIVATION == 4:
        share = tl.sigmoid(v)
        inner = d * share * (1 + v * (1 - share))
    elif ACTIVATION == 5:
        inner = tl.where(v < -3, 0.0, tl.where(v < 3, d * (v * (1 / 3) + 0.5), d))
    else:
        inner = d
    return inner
