"""Running statistics begin where the network is: not at means of 0 and variances of 1, nor with another operator."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcnet.layers import Decoupled

KEPT = ("running_mean", "running_var")


@torch.no_grad()
def start_statistics_(model: nn.Module, look: Callable[[], object]) -> None:
    """Gives every batch normalisation that has seen nothing the mean and variance of one batch; nothing else changes.

    A decoupled layer may give a hundredth of what its normalisation expects at first. After fewer steps than it takes
    to forget that, evaluation would be at chance, however well the network was trained.

    Args:
        model: the network, which is in training mode.
        look: sends a batch through it.
    """
    layers = [layer for layer in _tracking(model) if layer.momentum is not None and not layer.num_batches_tracked]
    if not layers:
        return
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    try:
        look()
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    _restore(model, layers, before)


def forget_statistics_(model: nn.Module) -> None:
    """Counts every batch normalisation as one that has seen nothing, for layers that compute something else by now.

    What it holds is left, for whoever evaluates the network as it is.
    """
    for layer in _tracking(model):
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.zero_()


@torch.no_grad()
def forget_norms_(model: nn.Module) -> None:
    """Lets every running mean norm begin with the next training batch, for layers that compute something else by now.

    Otherwise a short training would be evaluated with the old ones.
    """
    for layer in model.modules():
        if isinstance(layer, Decoupled) and layer.operator.decay is not None:
            layer.get_buffer("mean_norm").zero_()


def _tracking(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


def _restore(model: nn.Module, layers: list[_BatchNorm], before: dict[str, Tensor]) -> None:
    """All buffers but the statistics, and these, too, where the batch had none that could be used."""
    new = {id(getattr(layer, name)) for layer in layers for name in KEPT}
    for name, buffer in model.named_buffers():
        if id(buffer) not in new or not buffer.isfinite().all():
            buffer.copy_(before[name])
