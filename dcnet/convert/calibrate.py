"""Constants from data: decoupled layers whose outputs have the norms that the plain layers' outputs have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dcnet.convert.size import is_plain_at_start, size_constants
from dcnet.layers import Decoupled
from dcnet.norms import accumulation_dtype, patch_norm, vector_norm
from dcnet.part import Slot

Meet = Callable[[Decoupled, Tensor, Tensor], None]


def calibrate_(model: nn.Module, layers: Mapping[str, Decoupled], data: Iterable[Any]) -> list[str]:
    """Sets the constants of new layers so that each channel has the norm that it has in the plain layer.

    All layers see what they would see in the plain network. First comes the mean norm of their patches, which is also
    where a learned absolute radius starts; then the constants that set the size. Returns the names of the layers that
    the data did not reach.
    """
    batches = list(data) if isinstance(data, Iterator) else data
    norms = {layer: _Mean() for layer in layers.values()}
    if not _run_plain(model, norms, batches, lambda layer, x, _: norms[layer].add(_norms(layer, x))):
        raise ValueError("data to calibrate with has no batches: give it one or more")
    reached = [layer for layer in norms if norms[layer].count]
    for layer in reached:
        _set_radius_(layer, norms[layer].value)
    sizes = {layer: _Sizes(layer) for layer in reached if not is_plain_at_start(layer.operator)}
    if sizes and not _run_plain(model, sizes, batches, lambda layer, x, plain: sizes[layer].add(x, plain)):
        raise ValueError("data to calibrate with is read twice, and has no batches the second time: give a list")
    for layer, size in sizes.items():
        _set_size_(layer, size.ratio())
    return [name for name, layer in layers.items() if layer not in reached]


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise ValueError("data to calibrate with gives a patch norm that is not finite: look for NaN and inf in it")
        self.total += values.sum().item()
        self.count += values.numel()

    @property
    def value(self) -> float:
        return self.total / self.count


class _Sizes:
    """The sums of squares of each channel, plain and decoupled, before the bias."""

    def __init__(self, layer: Decoupled):
        self.layer = layer
        self.plain = self.decoupled = torch.zeros(layer.weight.shape[0], dtype=torch.float64, device="cpu")

    def add(self, input: Tensor, plain: Tensor) -> None:
        self.plain = self.plain + self._squares(plain)
        self.decoupled = self.decoupled + self._squares(self.layer.decoupled(input))

    def _squares(self, output: Tensor) -> Tensor:
        channels = -1 if isinstance(self.layer, nn.Linear) else -self.layer.weight.dim() + 1
        rows = output.movedim(channels, -1).reshape(-1, output.shape[channels])
        rows = rows.to(accumulation_dtype(rows.dtype))
        rows = rows if self.layer.bias is None else rows - self.layer.bias
        return rows.square().sum(0).cpu().double()

    def ratio(self) -> Tensor:
        """||plain|| / ||decoupled|| of each channel, 1 where one of them is zero."""
        ratio = (self.plain / self.decoupled).sqrt()
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))


def _norms(layer: Decoupled, input: Tensor) -> Tensor:
    if not isinstance(layer, _ConvNd):
        return vector_norm(input, layer.eps)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(input, layer._reversed_padding_repeated_twice, mode=mode)
    batch = padded if padded.dim() == layer.weight.dim() else padded.unsqueeze(0)
    ends = [(0, 0)] * len(layer.kernel_size)
    return patch_norm(batch, layer.kernel_size, layer.stride, ends, layer.dilation, layer.groups, layer.eps)


@torch.no_grad()
def _run_plain(model: nn.Module, layers: Iterable[Decoupled], batches: Iterable[Any], meet: Meet) -> bool:
    """Runs the network in evaluation mode with the layers as plain ones, and shows each its input and plain output.

    Says whether there was a batch.
    """

    def act_plain(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x = args[0] if args else kwargs["input"]
        plain = layer.plain(x)
        meet(layer, x, plain)
        return plain

    with contextlib.ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        for layer in layers:
            stack.callback(layer.register_forward_hook(act_plain, with_kwargs=True, prepend=True).remove)
        device, found = next(model.parameters()).device, False
        if isinstance(batches, Tensor):
            raise TypeError("data to calibrate with is a list of batches, not one tensor: give [x]")
        for batch in batches:
            model(_input_of(batch).to(device))
            found = True
    return found


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _input_of(batch: Any) -> Tensor:
    first = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    if not isinstance(first, Tensor):
        kind = type(first).__name__
        raise TypeError(f"a batch to calibrate with must be a tensor or a tuple that starts with one, not {kind}")
    return first


@torch.no_grad()
def _set_radius_(layer: Decoupled, mean_norm: float) -> None:
    if layer.operator.decay is not None:
        layer.get_buffer("mean_norm").fill_(mean_norm)
    for held in layer.operator._magnitudes:
        name = held.names.get("radius", "")
        slot = layer.operator.learned.get(name)
        if slot is not None and not slot.relative:
            layer.get_parameter(name).fill_(_stored(slot, torch.tensor(mean_norm, device="cpu")).item())


@torch.no_grad()
def _set_size_(layer: Decoupled, ratio: Tensor) -> None:
    for name in size_constants(layer.operator):
        slot = layer.operator.slots[name]
        layer.get_parameter(name).copy_(_stored(slot, slot.init * ratio))


def _stored(slot: Slot, value: Tensor) -> Tensor:
    """What a layer stores for a constant; a positive one stays clear of its floor, where it could not be learned."""
    return (value.clamp(min=2 * slot.floor) - slot.floor).sqrt() if slot.positive else value
