"""Operators and convolutions as the kernels see them: device functions, constants, shapes and layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dcnet.angle
import dcnet.magnitude
import dcnet.weighting
from dcnet.component import Component, belongs_to
from dcnet.norms import HALF_PRECISIONS
from dcnet.operator import REGISTRIES, Operator
from dcnet.parameters import Slot
from dcnet.registry import Registry
from dcnet.weighting import Weighting

# The largest number of learned constants of an operator.
MOST_LEARNED = 4
# The largest window of the depthwise kernels, which keep a sum for each of its positions in registers.
MOST_DEPTHWISE_TAPS = 49


@dataclass(frozen=True, eq=False)
class Plan:
    """An operator as the kernels see it; `plan_of` always returns the same object, so that caches compare identities.

    Constants come in the order: magnitude, angle, each followed by the fixed numbers of its device function.

    Attributes:
        names: the names of the constants; None for fixed numbers.
        kinds: four numbers for each constant: learned, per channel, positive, and the floor.
        summed: indices of the constants whose gradient is needed, for themselves or for the mean norm.
        learned: indices of the constants that a layer stores.
        known: values of the constants that are fixed at compile time; None for learned ones.
        scale: index of the magnitude's scale; -1 without one.
        cancels: whether the patch norm cancels, see `Operator`.
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
    cancels: bool

    def stored(self, constants: Sequence[Tensor | int]) -> tuple[Any, ...]:
        """Every constant: the tensor that a layer stores or its address, or the fixed value."""
        values: list[Any] = list(self.starts)
        for i, constant in zip(self.learned, constants, strict=True):
            values[i] = constant
        return tuple(values)


def has_device_functions(op: Operator) -> bool:
    """Whether every part of the operator has a device function and is registered under its name."""
    (first, *others), angle, weighting = op.magnitude.parts, op.angle, op.weighting
    if others or len(op.learned) > MOST_LEARNED:
        return False
    if not all(_is_registered(part.name, type(part)) for part in (first, angle, weighting)):
        return False
    return _own_device(first, "value") and _own_device(angle, "value") and _own_device(weighting, "factor", "argument")


def _is_registered(name: str, cls: type) -> bool:
    """Whether the class, or an instance of it, is registered under the name."""
    registries: list[Registry[Any]] = [dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry]
    found = [registry[name] for registry in registries if name in registry]
    return any(entry is cls or type(entry) is cls for entry in found)


# A compiler must not trace the registries; see `modern` in dispatch.py.
_is_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _own_device(part: Component | Weighting, *equations: str) -> bool:
    return part.device is not None and belongs_to(part, "device", *equations)


def plan_of(spec: str) -> Plan:
    """The plan of an operator's spec, whose parts may have been replaced in their registries."""
    return _plan_of(spec, *[registry.changes for registry in REGISTRIES])


@functools.lru_cache(maxsize=256)
def _plan_of(spec: str, *changes: int) -> Plan:
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
        kinds=tuple(number for slot in slots for number in _flags_of(slot)),
        relative=(*(slot.relative for slot in slots), False, False),
        summed=tuple(i for i, slot in enumerate(slots) if slot.learned or slot.relative),
        learned=tuple(i for i, slot in enumerate(slots) if slot.learned),
        known=(*(None if slot.learned else slot.init for slot in slots), None, None),
        scale=names.index("scale") if "scale" in names[: len(own)] else -1,
        decay=op.decay,
        cancels=op.norm_cancels,
    )


def _flags_of(slot: Slot) -> tuple[int, int, int, float]:
    return int(slot.learned), int(slot.per_channel), int(slot.positive), slot.floor


def _constants(part: Component) -> list[tuple[str | None, Slot]]:
    return [*part.slots().items(), *((None, Slot(number)) for number in part.fixed_numbers())]


@dataclass(frozen=True)
class Window:
    """The shapes and the memory layout of a convolution."""

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
    def depthwise(self) -> bool:
        """Whether every channel has its own filter, and kernels can unroll the window."""
        small = self.kernel[0] * self.kernel[1] <= MOST_DEPTHWISE_TAPS
        return 1 < self.groups == self.channels == self.filters and small

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def outs(self) -> int:
        return self.out[0] * self.out[1]

    @functools.cached_property
    def is_pointwise(self) -> bool:
        """Whether all filters are 1x1, in one group, and channels are adjacent: the convolution is a matrix product."""
        ones = self.kernel == self.stride == (1, 1) and self.padding == (0, 0)
        return ones and self.groups == 1 and self.channels_last

    def _is_matrix_product(self, x: Tensor) -> bool:
        """Whether to multiply matrices in place of a convolution.

        In float32, torch has separate precision settings for convolutions and matrix products. The rows of a
        linear layer are an image of height 1.
        """
        return self.is_pointwise and (x.dtype in HALF_PRECISIONS or self.batch == self.size[0] == 1)

    def convolve(self, x: Tensor, filters: Tensor) -> Tensor:
        """torch's convolution, without a bias, in the memory layout of the window."""
        if self._is_matrix_product(x):
            return self._images(self._rows(x) @ filters.view(self.filters, -1).t())
        product = torch.convolution(x, filters, None, *self.arguments)
        return product.contiguous(memory_format=self.format)

    def convolve_backward(self, gradient: Tensor, x: Tensor, filters: Tensor, *wanted: bool) -> list[Tensor]:
        """The gradients of `convolve` by input and filters, in the layout of the window; empty if not wanted."""
        # Allocated only if it is returned, since host time is the limit of small layers.
        nothing = gradient if all(wanted) else x.new_empty(0)
        if not any(wanted):
            return [nothing, nothing]
        if self._is_matrix_product(x):
            rows = self._rows(gradient)
            by_input = self._images(rows @ filters.view(self.filters, -1)) if wanted[0] else nothing
            return [by_input, (rows.t() @ self._rows(x)).view(filters.shape) if wanted[1] else nothing]
        mask = (*wanted, False)
        found = torch.ops.aten.convolution_backward.default(gradient, x, filters, None, *self.arguments, mask)
        return [
            made.contiguous(memory_format=self.format) if want else nothing
            for made, want in zip(found, wanted, strict=False)
        ]

    def _rows(self, x: Tensor) -> Tensor:
        """Images in channels last as a matrix with a row per pixel."""
        return x.permute(0, 2, 3, 1).view(-1, x.shape[1])

    def _images(self, rows: Tensor) -> Tensor:
        return rows.view(self.batch, *self.size, -1).permute(0, 3, 1, 2)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of torch's convolution after the tensors; the convolution is not transposed."""
        return self.stride, self.padding, self.dilation, False, (0, 0), self.groups

    def empty_output(self, x: Tensor) -> Tensor:
        """Memory for the output, in the dtype and on the device of the input."""
        size = (self.batch, self.filters, *self.out)
        return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=self.format)

    def pieces(self, channels: int, pixels: int) -> tuple[int, int, int, int, int, int]:
        """Images, pixels per image, the strides of image, pixel and channel, and the channels per group."""
        if self.channels_last:
            return 1, self.batch * pixels, 0, channels, 1, channels // self.groups
        return self.batch, pixels, channels * pixels, 1, pixels, channels // self.groups


def lies_channels_last(x: Tensor) -> bool:
    """Whether torch treats the tensor as channels last; not if it is contiguous in both memory formats."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
