"""What the kernels need to know of an operator and of a convolution, worked out before anything is launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dcnet.angle
import dcnet.weighting
from dcnet import magnitude
from dcnet.operator import Operator
from dcnet.part import Part, Slot
from dcnet.weighting import Weighting

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
    """Whether every part of the operator can be computed in a kernel, and found there by the operator's spec."""
    (first, *others), angle, weighting = op.magnitude.parts, op.angle, op.weighting
    if others or len(op.learned) > MOST_LEARNED:
        return False
    known = magnitude.registry.get(first.name) is type(first) and dcnet.angle.registry.get(angle.name) is type(angle)
    # By type: a copied or unpickled operator has a weighting of its own.
    if not known or type(dcnet.weighting.registry.get(weighting.name)) is not type(weighting):
        return False
    return _own_device(first, "value") and _own_device(angle, "value") and _own_device(weighting, "factor", "argument")


def _own_device(part: Part | Weighting, *equations: str) -> bool:
    """Whether the device function is that of the part's equation: a subclass may have changed one and not the other."""
    if part.device is None:
        return False
    for base in type(part).__mro__:
        if "device" in vars(base):
            return True
        if any(equation in vars(base) for equation in equations):
            return False
    return False


@functools.lru_cache(maxsize=256)
def plan_of(spec: str) -> Plan:
    """The plan of an operator's spec."""
    op = Operator.parse(spec)
    (h,) = op.magnitude.parts
    own, angular = _constants(h), _constants(op.angle)
    constants = [*own, *angular]
    slots = [slot for _, slot in constants]
    names = tuple(name for name, _ in constants)
    return Plan(
        magnitude=h.device,
        angle=op.angle.device,
        inverse=op.angle.device_inverse,
        weighting=op.weighting.device,
        weighted=op.weighted,
        invertible=op.angle.device_inverse is not None and not h.vanishes,
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
