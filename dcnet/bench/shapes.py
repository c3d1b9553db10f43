"""Shapes of the timed layers, lower bounds of their times, and the naive formulation."""

import re
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.layers import DecoupledConv2d

PATTERN = re.compile(r"N(\d+)xC(\d+)x(\d+)(?:x(\d+))?(?:xK(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Ceilings:
    """Peak speeds of a device: bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """Minimal work: every input read once, every output written once, every product computed."""

    bytes: int
    flops: int

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Lower bound of the time: the larger of the times for memory traffic and for computation."""
        return 1000 * max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


@dataclass(frozen=True)
class Shape:
    """A square convolution with as many filters as channels, stride 1, same padding and no bias."""

    batch: int
    channels: int
    height: int
    width: int
    kernel: int = 3

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses N512xC64x32, N8xC3x32x48 or N8xC3x32xK5."""
        found = PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(
                f"unknown shape {text!r}: write N512xC64x32 for 512 images of 64 channels and 32x32 pixels, "
                "N512xC64x32x48 if they are not square, and N512xC64x32xK5 for 5x5 filters"
            )
        batch, channels, height = (int(number) for number in found.groups()[:3])
        shape = cls(batch, channels, height, int(found[4] or height), int(found[5] or 3))
        if min(batch, channels, height, shape.width) < 1:
            raise ValueError(f"numbers of a shape must be 1 or more, not {text!r}")
        if shape.kernel % 2 == 0:
            raise ValueError(f"the filter size after K must be odd to keep the image size, not {text!r}")
        return shape

    def __str__(self) -> str:
        size = f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"
        return f"N{self.batch}xC{self.channels}x{size}" + ("" if self.kernel == 3 else f"xK{self.kernel}")

    @property
    def images(self) -> tuple[int, int, int, int]:
        """The shape of input and output."""
        return self.batch, self.channels, self.height, self.width

    def forward(self, itemsize: int) -> Work:
        """Reads images and filters, writes the output."""
        return Work((2 * self._image_values + self._filter_values) * itemsize, self._products)

    def backward(self, itemsize: int) -> Work:
        """Reads images, filters and the gradient of the output, writes the gradients of images and filters."""
        return Work((3 * self._image_values + 2 * self._filter_values) * itemsize, 2 * self._products)

    def floors(self, itemsize: int, ceilings: Ceilings) -> dict[str, float]:
        """Lower bounds in ms of the forward pass, and of forward and backward together."""
        forward, backward = self.forward(itemsize).floor_ms(ceilings), self.backward(itemsize).floor_ms(ceilings)
        return {"forward": forward, "training": forward + backward}

    @property
    def _image_values(self) -> int:
        return self.batch * self.channels * self.height * self.width

    @property
    def _filter_values(self) -> int:
        return self.channels**2 * self.kernel**2

    @property
    def _products(self) -> int:
        return 2 * self._image_values * self.channels * self.kernel**2


def naive_conv2d(layer: DecoupledConv2d, x: Tensor) -> Tensor:
    """A layer in training as the authors wrote it: a convolution with ones for the norms, a division, h and g.

    Supports one group, zero padding and no bias; the running mean norm is not updated.
    """
    op = layer.operator
    window: Any = (layer.stride, layer.padding, layer.dilation)
    n = (F.conv2d(x * x, torch.ones_like(layer.weight[:1]), None, *window) + layer.eps).sqrt()
    w_norm = (layer.weight.square().sum((1, 2, 3)) + layer.eps).sqrt().view(-1, 1, 1)
    cos = F.conv2d(x, layer.weight, None, *window) / (n * w_norm)
    of_filters = {
        name: value.view(-1, 1, 1) if isinstance(value, Tensor) and op.slots[name].per_channel else value
        for name, value in layer.constants().items()
    }
    mean = n.mean()
    of_patches = {name: value * mean if op.slots[name].relative else value for name, value in of_filters.items()}
    factor = op.factor(w_norm, of_filters)
    return factor * op.h(op.weighting.argument(w_norm, n), of_patches) * op.g(cos, of_filters)
