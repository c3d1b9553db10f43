"""Running mean norms of a whole network: averaged over processes, and recomputed from data."""

import contextlib
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dcnet.layers import Decoupled
from dcnet.modes import evaluating, kept_buffers
from dcnet.norms import Processes

Model = TypeVar("Model", bound=nn.Module)


def sync_norms(model: Model, group: Any = None) -> Model:
    """Makes relative radii use, in training, the mean norm over the joint batch of all processes.

    Without it each process uses the mean of its share, as batch normalization does without `torch.nn.SyncBatchNorm`.
    With it, processes under DistributedDataParallel compute what one process computes from the joint batch, including
    gradients, if their shares are equal. Each such layer waits for the other processes once in the forward and once in
    the backward pass, and is computed in eager PyTorch in training. Nothing changes in evaluation, with one process, or
    without torch.distributed.

    Args:
        model: any network; its layers are changed in place, and it is returned.
        group: a group of torch.distributed; all processes by default. A model with a group cannot be pickled.
    """
    for layer in tracked_layers(model):
        layer.sync = Processes(group)
    return model


@torch.no_grad()
def update_norms(model: nn.Module, data: Iterable[Any]) -> None:
    """Sets each running mean norm to the mean over the data, as `torch.optim.swa_utils.update_bn` does for statistics.

    A running mean lags behind training: by a tenth of the steps at first, by 1,000 steps later. Only the mean norms and
    their counts of batches change; if batch normalization needs an update too, call `update_bn` first. After
    `sync_norms` all processes must call it, with the same number of batches.

    Args:
        model: any network; it runs in evaluation mode, except for the mean norm of the batch.
        data: batches, which are tensors or tuples that start with one; they are moved to the model's device.
    """
    if isinstance(data, Tensor):
        raise TypeError("data must be an iterable of batches, not one tensor: give [x]")
    tracked = tracked_layers(model)
    means = [layer.get_buffer("mean_norm") for layer in tracked]
    counts = [layer.get_buffer("num_batches_tracked") for layer in tracked]
    found: list[list[float]] = [[] for _ in means]
    with kept_buffers(model), evaluating(model), _collect_mean_norms(tracked, found):
        for layer in tracked:
            layer.training = True
        for batch in data:
            model(_input(batch, model))
    for seen, mean, count in zip(found, means, counts, strict=True):
        if seen:
            mean.fill_(statistics.fmean(seen))
            count.fill_(len(seen))


def tracked_layers(model: nn.Module) -> list[Decoupled]:
    """The layers with a relative radius, which track the mean norm."""
    layers = [module for module in model.modules() if isinstance(module, Decoupled)]
    return [layer for layer in layers if layer.operator.decay is not None]


@contextlib.contextmanager
def _collect_mean_norms(layers: list[Decoupled], found: list[list[float]]) -> Iterator[None]:
    """Collects the mean norm of every call of each layer; a batch may call a layer several times.

    Before each call the mean norm is zero, so that the layer sets it to that of the batch, unless it is not finite.
    """

    def reset(layer: nn.Module, _: Any) -> None:
        layer.get_buffer("mean_norm").zero_()

    with contextlib.ExitStack() as hooks:
        for layer, seen in zip(layers, found, strict=True):

            def collect(layer: nn.Module, *_: Any, seen: list[float] = seen) -> None:
                mean = layer.get_buffer("mean_norm").item()
                seen.extend([mean] if mean > 0 else [])

            hooks.enter_context(layer.register_forward_pre_hook(reset))
            hooks.enter_context(layer.register_forward_hook(collect))
        yield


def _input(batch: Any, model: nn.Module) -> Tensor:
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(first, Tensor):
        raise TypeError(f"a batch must be a tensor or a tuple that starts with one, not a {type(first).__name__}")
    return first.to(next(model.parameters()).device)
