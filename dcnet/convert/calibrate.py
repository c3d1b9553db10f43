"""Calibration from data: sets constants so that the outputs of decoupled and plain layers have equal norms."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers import Decoupled
from dcnet.magnitude import Sum
from dcnet.modes import evaluating
from dcnet.norms import accumulation_dtype
from dcnet.operator import Operator
from dcnet.parameters import Learnable, Slot, Value

# Norms of filters (columns) and patches (rows) at which an operator is evaluated. On the CPU, also if the module is
# imported on first use inside of `with torch.device(...)`.
FILTER_NORMS = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64, device="cpu")
PATCH_NORMS = torch.tensor([[0.01], [0.3], [1.0], [5.0], [100.0]], dtype=torch.float64, device="cpu")


def calibratable(operator: Operator) -> Operator:
    """The operator with its size constants learned per channel; unchanged if it starts as the plain layer."""
    if is_plain_at_start(operator):
        return operator
    names = size_constants(operator)
    parts: list[Any] = []
    for term in operator.magnitude_terms:
        slots = {own: operator.slots[name] for own, name in term.names.items() if name in names}
        learned: dict[str, Any] = {
            own: Learnable(slot.init, per_channel=True, floor=slot.floor) for own, slot in slots.items()
        }
        parts.append(dataclasses.replace(term.component, **learned))
    magnitude = parts[0] if len(parts) == 1 else Sum(tuple(parts))
    return Operator(magnitude, operator.angle, operator.weighting)


def is_plain_at_start(operator: Operator) -> bool:
    """Whether a new layer of the operator computes ||w|| ||x|| cos(theta), as `linear-cos+linear` does."""
    size = _size(operator, operator.constants({}))
    return operator.angle.identity and torch.allclose(size, FILTER_NORMS * PATCH_NORMS)


def size_constants(operator: Operator) -> list[str]:
    """The constants that scale the output: doubling all of them doubles the output. Scales, and slopes if any."""
    owned = [(own, name) for term in operator.magnitude_terms for own, name in term.names.items()]
    scales = [name for own, name in owned if own == "scale"]
    all_but_radii = [name for own, name in owned if own != "radius"]
    start = operator.constants({})
    for names in (scales, all_but_radii):
        doubled = {name: 2 * value if name in names else value for name, value in start.items()}
        if names and torch.allclose(_size(operator, doubled), 2 * _size(operator, start)):
            return names
    raise ValueError(
        f"{str(operator)!r} cannot be calibrated, since no constant scales its output: use start='as-is', "
        "or a magnitude with a scale"
    )


def _size(operator: Operator, constants: Mapping[str, Value]) -> Tensor:
    """h(||w||, ||x||) at FILTER_NORMS and PATCH_NORMS."""
    h = operator.h(operator.weighting.argument(FILTER_NORMS, PATCH_NORMS), constants)
    factor = operator.factor(FILTER_NORMS, constants)
    return h * factor + 0 * FILTER_NORMS


# Called with a layer, its input and its plain output.
Visit = Callable[[Decoupled, Tensor, Tensor], None]


def calibrate_(model: nn.Module, layers: Mapping[str, Decoupled], data: Iterable[Any]) -> list[str]:
    """Sets the constants of new layers so that each output channel has the same norm as in the plain layer.

    All layers get the inputs that they get in the plain network. The first pass over the data sets the mean norm of the
    patches, which is also the initial value of a learned absolute radius; the second sets the size constants. Returns
    the names of the layers that the data did not reach.
    """
    batches = list(data) if isinstance(data, Iterator) else data
    norms = {layer: _Mean() for layer in layers.values()}
    if not _run_plain(model, norms, batches, lambda layer, x, _: norms[layer].add(layer.patches(x).norm(layer.eps))):
        raise ValueError("calibration data must have at least one batch, not 0")
    reached = [layer for layer in norms if norms[layer].count]
    for layer in reached:
        _set_radius_(layer, norms[layer].value)
    sizes = {layer: _Sizes(layer) for layer in reached if not is_plain_at_start(layer.operator)}
    if sizes and not _run_plain(model, sizes, batches, lambda layer, x, plain: sizes[layer].add(x, plain)):
        raise ValueError("calibration data is read twice and had no batches the second time: give a list")
    for layer, size in sizes.items():
        _set_size_(layer, size.ratio())
    return [name for name, layer in layers.items() if layer not in reached]


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise ValueError("calibration data leads to a patch norm that is not finite: remove NaN and inf from it")
        self.total += values.sum().item()
        self.count += values.numel()

    @property
    def value(self) -> float:
        return self.total / self.count


class _Sizes:
    """The sums of squares of each channel, plain and decoupled, without the bias."""

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
        """||plain|| / ||decoupled|| of each channel; 1 where one of them is zero."""
        ratio = (self.plain / self.decoupled).sqrt()
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))


@torch.no_grad()
def _run_plain(model: nn.Module, layers: Iterable[Decoupled], batches: Iterable[Any], visit: Visit) -> bool:
    """Runs the network in evaluation mode with plain layers, and calls `visit` for each with its input and output.

    Returns whether there was a batch.
    """

    def act_plain(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x = args[0] if args else kwargs["input"]
        plain = layer.plain(x)
        visit(layer, x, plain)
        return plain

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for layer in layers:
            stack.callback(layer.register_forward_hook(act_plain, with_kwargs=True, prepend=True).remove)
        device, found = next(model.parameters()).device, False
        if isinstance(batches, Tensor):
            raise TypeError("calibration data must be a list of batches, not one tensor: give [x]")
        for batch in batches:
            model(_input_of(batch).to(device))
            found = True
    return found


def _input_of(batch: Any) -> Tensor:
    first = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    if not isinstance(first, Tensor):
        kind = type(first).__name__
        raise TypeError(f"a calibration batch must be a tensor or a tuple that starts with one, not {kind}")
    return first


@torch.no_grad()
def _set_radius_(layer: Decoupled, mean_norm: float) -> None:
    if layer.operator.decay is not None:
        layer.get_buffer("mean_norm").fill_(mean_norm)
    for term in layer.operator.magnitude_terms:
        name = term.names.get("radius", "")
        slot = layer.operator.learned.get(name)
        if slot is not None and not slot.relative:
            layer.get_parameter(name).fill_(_stored(slot, torch.tensor(mean_norm, device="cpu")).item())


@torch.no_grad()
def _set_size_(layer: Decoupled, ratio: Tensor) -> None:
    for name in size_constants(layer.operator):
        slot = layer.operator.slots[name]
        layer.get_parameter(name).copy_(_stored(slot, slot.init * ratio))


def _stored(slot: Slot, value: Tensor) -> Tensor:
    """The stored value of a constant; a positive one stays above its floor, where its gradient would vanish."""
    return (value.clamp(min=2 * slot.floor) - slot.floor).sqrt() if slot.positive else value
