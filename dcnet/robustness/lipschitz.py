"""Lipschitz constants of layers and of what is built of them, in evaluation mode."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.bounds import Signal, visit
from dcnet.robustness.bounds.signal import first_signal
from dcnet.robustness.norms import as_norm
from dcnet.robustness.task import device_of
from dcnet.verification.embeddings import evaluating


def lipschitz(module: nn.Module, shape: Sequence[int], norm: str = "l2") -> float:
    """No less than |module(a) - module(b)| / |a - b| for any a and b, both sides in the norm.

    Args:
        module: a layer, or anything that `certify` covers; its parameters, running statistics and mean norms are taken
            as they are, as in evaluation mode.
        shape: of one input, without the batch: [channels, height, width], or [features].
        norm: "l2" or "linf".
    """
    signal = signal_of(module, shape, norm)
    found = signal.l2 if norm == "l2" else float(signal.moved.max())
    # Beyond all numbers, as the product of very many layers, there is no bound.
    return math.inf if math.isnan(found) else found


def output_bounds(module: nn.Module, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Between which the outputs of each channel lie, whatever the input is: lowest and highest, float64 [channels]."""
    signal = signal_of(module, shape, "linf")
    return signal.low, signal.high


@torch.inference_mode(False)
@torch.no_grad()
def signal_of(module: nn.Module, shape: Sequence[int], norm: str) -> Signal:
    """What is known of the module's outputs, for inputs that are moved by 1 in the norm."""
    as_norm(norm)
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model must be an nn.Module, not {type(module).__name__}")
    check_shape(shape)
    check_finite(module)
    # Constants are made on the CPU, which numbers of any device may meet, whatever the default is.
    with evaluating(module), torch.device("cpu"):
        return visit(module, first_signal(tuple(shape), norm, device_of(module, torch.empty(0))))


def check_shape(shape: Sequence[Any]) -> None:
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape)
    if not len(shape) or not whole:
        raise ValueError(f"the shape of an input must be whole numbers above 0, such as (3, 32, 32), not {shape!r}")


def check_finite(module: nn.Module) -> None:
    """Refuses weights of which nothing can be said."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} of the network is not finite, so that nothing bounds what it computes")
