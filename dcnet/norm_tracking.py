"""Mean norms over several processes, and running ones from data, where training was too short for them to settle."""

import contextlib
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dcnet.equation import Processes
from dcnet.layers import Decoupled

Model = TypeVar("Model", bound=nn.Module)


def sync_norms(model: Model, group: Any = None) -> Model:
    """Makes a relative radius multiply, in training, the mean norm over the joint batch of all processes.

    Without it each process takes the mean of its own share, as batch normalisation does without
    `torch.nn.SyncBatchNorm`. With it, processes under DistributedDataParallel compute what one process computes from
    the joint batch, gradients included, if their shares are equal. Each of such layers waits for the other processes,
    once forward and once backward, and is computed by torch in training. Nothing changes in evaluation, with one
    process, or without torch.distributed.

    Args:
        model: any network; its layers are marked, and it is returned.
        group: a group of torch.distributed; all processes by default. Only without one can the model be pickled.
    """
    for module in model.modules():
        if isinstance(module, Decoupled) and module.operator.decay is not None:
            module.sync = Processes(group)
    return model


@torch.no_grad()
def update_norms(model: nn.Module, data: Iterable[Any]) -> None:
    """Sets each running mean norm to the mean over the data, as `torch.optim.swa_utils.update_bn` does for statistics.

    A running mean follows training with a delay: of a tenth of the steps at first, of 1,000 steps later. All but the
    mean norms and their counts of batches is left as it is; where batch normalisation needs it too, call `update_bn`
    first. After `sync_norms` all processes have to call it, with as many batches each.

    Args:
        model: any network; it sees the data in evaluation mode, but for the batch's own mean norm.
        data: batches, which are tensors or tuples that start with one; they are moved to the model's device.
    """
    if isinstance(data, Tensor):
        raise TypeError("data to update norms with is a list of batches, not one tensor: give [x]")
    layers = [module for module in model.modules() if isinstance(module, Decoupled)]
    tracked = [layer for layer in layers if layer.operator.decay is not None]
    means = [layer.get_buffer("mean_norm") for layer in tracked]
    counts = [layer.get_buffer("num_batches_tracked") for layer in tracked]
    found: list[list[float]] = [[] for _ in means]
    before = [buffer.clone() for buffer in (*means, *counts)]
    try:
        with _only_norms_in_training(model), _every_call(tracked, found):
            for batch in data:
                model(_input(batch, model))
    finally:
        for buffer, old in zip((*means, *counts), before, strict=True):
            buffer.copy_(old)
    for seen, mean, count in zip(found, means, counts, strict=True):
        if seen:
            mean.fill_(statistics.fmean(seen))
            count.fill_(len(seen))


@contextlib.contextmanager
def _every_call(layers: list[Decoupled], found: list[list[float]]) -> Iterator[None]:
    """Notes the mean norm of every call of each layer, of which a batch may have several.

    From zero, a layer in training takes over the batch's mean norm; what is not finite leaves the zero.
    """

    def begins(layer: nn.Module, _: Any) -> None:
        layer.get_buffer("mean_norm").zero_()

    with contextlib.ExitStack() as hooks:
        for layer, seen in zip(layers, found, strict=True):

            def ends(layer: nn.Module, *_: Any, seen: list[float] = seen) -> None:
                mean = layer.get_buffer("mean_norm").item()
                seen.extend([mean] if mean > 0 else [])

            hooks.enter_context(layer.register_forward_pre_hook(begins))
            hooks.enter_context(layer.register_forward_hook(ends))
        yield


@contextlib.contextmanager
def _only_norms_in_training(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = isinstance(module, Decoupled)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _input(batch: Any, model: nn.Module) -> Tensor:
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(first, Tensor):
        raise TypeError(f"a batch must be a tensor or a tuple that starts with one, not a {type(first).__name__}")
    return first.to(next(model.parameters()).device)
