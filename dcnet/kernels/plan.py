"""What the kernels need to know of an operator and of a convolution, worked out before anything is launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet.operator import Operator
from dcnet.part import Part, Slot

# How many constants of a magnitude and an angle together may be learned.
MOST_LEARNED = 4


@dataclass(frozen=True)
class Plan:
    """An operator as the kernels see it.

    The constants are those of the magnitude, then those of the angle, each followed by the fixed numbers of its device
    function; `names` has None for these. `kinds` says of each, in four numbers, whether it is learned, per channel and
    positive, and its floor. `learned` are the indices of those that a layer stores, `summed` of those that get
    gradients, their own or on behalf of the mean norm, and `scale` is that of the magnitude's scale, -1 without one.
    """

    magnitude: Any
    angle: Any
    inverse: Any
    weighting: Any
    weighted: bool
    invertible: bool
    counts: tuple[int, int]
    names: tuple[str | None, ...]
    starts: tuple[float, ...]
    kinds: tuple[float, ...]
    relative: tuple[bool, ...]
    summed: tuple[int, ...]
    learned: tuple[int, ...]
    known: tuple[float | None, ...]
    scale: int
    decay: float | None

    def stored(self, constants: Sequence[Tensor]) -> tuple[Any, ...]:
        """Every constant: the tensor that a layer stores, or the number it is."""
        given = dict(zip(self.learned, constants, strict=True))
        return tuple(given.get(i, start) for i, start in enumerate(self.starts))


def has_device_functions(op: Operator) -> bool:
    """Whether every part of the operator can be computed in a kernel."""
    parts = op.magnitude.parts
    return (
        len(parts) == 1
        and len(op.learned) <= MOST_LEARNED
        and None not in (parts[0].device, op.angle.device, op.weighting.device)
    )


@functools.lru_cache(maxsize=256)
def plan_of(spec: str) -> Plan:
    """The plan of an operator's spec."""
    op = Operator.parse(spec)
    (magnitude,) = op.magnitude.parts
    own, angular = _constants(magnitude), _constants(op.angle)
    constants = [*own, *angular]
    slots = [slot for _, slot in constants]
    names = tuple(name for name, _ in constants)
    return Plan(
        magnitude=magnitude.device,
        angle=op.angle.device,
        inverse=op.angle.device_inverse,
        weighting=op.weighting.device,
        weighted=op.weighted,
        invertible=op.angle.device_inverse is not None and not magnitude.vanishes,
        counts=(len(own), len(angular)),
        names=names,
        starts=tuple(slot.init for slot in slots),
        kinds=tuple(number for slot in slots for number in _kind(slot)),
        relative=(*(slot.relative for slot in slots), False, False),
        summed=tuple(i for i, slot in enumerate(slots) if slot.learned or slot.relative),
        learned=tuple(i for i, slot in enumerate(slots) if slot.learned),
        known=(*(None if slot.learned else slot.init for slot in slots), None, None),
        scale=names.index("scale") if "scale" in names[: len(own)] else -1,
        decay=op.decay,
    )


def _kind(slot: Slot) -> tuple[int, int, int, float]:
    return int(slot.learned), int(slot.per_channel), int(slot.positive), slot.floor


def _constants(part: Part) -> list[tuple[str | None, Slot]]:
    return [*part.slots().items(), *((None, Slot(number)) for number in part.fixed_numbers())]


@dataclass(frozen=True)
class Window:
    """A convolution: its shapes, and how its tensors lie in memory."""

    batch: int
    channels: int
    size: tuple[int, int]
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Window:
        (batch, channels, high, wide), (filters, _, *kernel) = x.shape, w.shape
        steps, pads, gaps = tuple(stride), tuple(padding), tuple(dilation)
        last = lies_channels_last(x) or lies_channels_last(w)
        return cls(batch, channels, (high, wide), filters, (kernel[0], kernel[1]), steps, pads, gaps, groups, last)

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def out(self) -> tuple[int, int]:
        """The height and width of the output."""
        spans = [step * (size - 1) + 1 for size, step in zip(self.kernel, self.dilation, strict=True)]
        high, wide = [
            (size + 2 * pad - span) // step + 1
            for size, pad, span, step in zip(self.size, self.padding, spans, self.stride, strict=True)
        ]
        return high, wide

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def outs(self) -> int:
        return self.out[0] * self.out[1]

    def pieces(self, channels: int, pixels: int) -> tuple[int, int, int, int, int, int]:
        """Images, pixels of an image, the strides of image, pixel and channel, and the channels of a group."""
        if self.channels_last:
            return 1, self.batch * pixels, 0, channels, 1, channels // self.groups
        return self.batch, pixels, channels * pixels, 1, pixels, channels // self.groups


def lies_channels_last(x: Tensor) -> bool:
    """Whether torch would take the tensor as channels last: only if that is not its ordinary layout, too."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
