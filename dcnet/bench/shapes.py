"""Shapes of the timed layers: their notation, their layers, and lower bounds of their times."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.attention import DecoupledAttention, check_operator
from dcnet.layers import conv1d, conv2d, conv3d, linear
from dcnet.operator import as_operator, is_plain

EXAMPLES = (
    "write N512xC64x32 for 512 images of 64 channels and 32x32 pixels (x32x48 if they are not square, xK5 for 5x5 "
    "filters, xG64 for 64 groups)"
)
OTHERS = (
    "N64xC256xL1024 for sequences, N8xC32xD16x28 for volumes, M50432x384-1536 for a linear layer, "
    "B64xH6xT197xD64 for attention"
)


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


class LayerShape(ABC):
    """The sizes of a timed layer and of its input; str(shape) is its notation in records."""

    pattern: ClassVar[re.Pattern[str]]
    names: ClassVar[tuple[str, ...]] = ("x",)
    channels_last: ClassVar[bool] = False

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parses a shape; returns None for other kinds of shapes. ValueError for impossible sizes."""
        found = cls.pattern.fullmatch(text)
        if found is None:
            return None
        numbers = cls.numbers(found.groups())
        if min(numbers) < 1:
            raise ValueError(f"numbers of a shape must be 1 or more, not {text!r}")
        make: Any = cls
        shape: Self = make(*numbers)
        return shape

    @classmethod
    def numbers(cls, texts: Sequence[str]) -> list[int]:
        """The numbers of a shape from its parts that `pattern` matches."""
        return [int(text) for text in texts]

    @property
    @abstractmethod
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input, by name."""

    @property
    @abstractmethod
    def output(self) -> tuple[int, ...]:
        """The shape of the output."""

    @property
    @abstractmethod
    def filters(self) -> int:
        """The number of values of all filters."""

    @property
    @abstractmethod
    def products(self) -> int:
        """Floating-point operations of the forward pass."""

    @abstractmethod
    def make(self, operator: str) -> nn.Module:
        """A layer with this operator, or the plain one."""

    def obstacle(self, operator: str) -> str:
        """Why a layer of this kind does not support the operator; empty if it does."""
        return ""

    def forward(self, itemsize: int) -> Work:
        """Reads inputs and filters, writes the output."""
        return Work((self._given + self.filters + math.prod(self.output)) * itemsize, self.products)

    def backward(self, itemsize: int) -> Work:
        """Reads inputs, filters and the gradient of the output, writes the gradients of inputs and filters."""
        return Work((2 * self._given + 2 * self.filters + math.prod(self.output)) * itemsize, 2 * self.products)

    def floors(self, itemsize: int, ceilings: Ceilings) -> dict[str, float]:
        """Lower bounds in ms of the forward pass, and of forward and backward together."""
        forward, backward = self.forward(itemsize).floor_ms(ceilings), self.backward(itemsize).floor_ms(ceilings)
        return {"forward": forward, "training": forward + backward}

    @property
    def _given(self) -> int:
        return sum(math.prod(shape) for shape in self.inputs.values())


class ConvShape(LayerShape):
    """A convolution with as many filters as channels, stride 1, same padding and no bias; `mark` precedes its sizes."""

    mark: ClassVar[str] = ""
    batch: int
    channels: int
    kernel: int
    groups: int

    @classmethod
    def numbers(cls, texts: Sequence[str | None]) -> list[int]:
        *sizes, kernel, groups = texts
        numbers = [int(size) for size in sizes if size]
        # The last side may be left out if it equals the one before.
        return [*numbers, *numbers[-1:] * (len(sizes) - len(numbers)), int(kernel or 3), int(groups or 1)]

    @classmethod
    def read(cls, text: str) -> Self | None:
        shape = super().read(text)
        if shape is not None and shape.kernel % 2 == 0:
            raise ValueError(f"the filter size after K must be odd to keep the image size, not {text!r}")
        if shape is not None and shape.channels % shape.groups:
            raise ValueError(f"the groups after G must divide the channels after C, not {text!r}")
        return shape

    def __str__(self) -> str:
        *sizes, last = self.sizes
        shown = "x".join(map(str, sizes if sizes[-1:] == [last] else self.sizes))
        kernel = "" if self.kernel == 3 else f"xK{self.kernel}"
        groups = "" if self.groups == 1 else f"xG{self.groups}"
        return f"N{self.batch}xC{self.channels}x{self.mark}{shown}{kernel}{groups}"

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The length of a sequence, or the sides of an image or a volume."""

    @property
    def images(self) -> tuple[int, ...]:
        """The shape of input and output."""
        return self.batch, self.channels, *self.sizes

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        return {"x": self.images}

    @property
    def output(self) -> tuple[int, ...]:
        return self.images

    @property
    def filters(self) -> int:
        return self.channels**2 // self.groups * self.kernel ** len(self.sizes)

    @property
    def products(self) -> int:
        return 2 * math.prod(self.images) * self.channels // self.groups * self.kernel ** len(self.sizes)

    def make(self, operator: str) -> nn.Module:
        build: Any = {1: conv1d, 2: conv2d, 3: conv3d}[len(self.sizes)]
        sizes = (self.channels, self.channels, self.kernel)
        layer: nn.Module = build(*sizes, padding=self.kernel // 2, groups=self.groups, bias=False, operator=operator)
        return layer


ENDING = r"(?:xK(\d+))?(?:xG(\d+))?"


@dataclass(frozen=True)
class Shape(ConvShape):
    """A convolution of images, compared with nn.Conv2d."""

    pattern = re.compile(rf"N(\d+)xC(\d+)x(\d+)(?:x(\d+))?{ENDING}", re.IGNORECASE)
    channels_last = True
    batch: int
    channels: int
    height: int
    width: int
    kernel: int = 3
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses N512xC64x32, N8xC3x32x48, N8xC3x32xK5 or N8xC4x32xG2."""
        shape = cls.read(text)
        if shape is None:
            raise ValueError(f"unknown shape {text!r}: {EXAMPLES}")
        return shape

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.height, self.width


@dataclass(frozen=True)
class SequenceShape(ConvShape):
    """A convolution of sequences, compared with nn.Conv1d."""

    pattern = re.compile(rf"N(\d+)xC(\d+)xL(\d+){ENDING}", re.IGNORECASE)
    mark = "L"
    batch: int
    channels: int
    length: int
    kernel: int = 3
    groups: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.length,)


@dataclass(frozen=True)
class VolumeShape(ConvShape):
    """A convolution of volumes, compared with nn.Conv3d."""

    pattern = re.compile(rf"N(\d+)xC(\d+)xD(\d+)x(\d+)(?:x(\d+))?{ENDING}", re.IGNORECASE)
    mark = "D"
    batch: int
    channels: int
    depth: int
    height: int
    width: int
    kernel: int = 3
    groups: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.depth, self.height, self.width


@dataclass(frozen=True)
class LinearShape(LayerShape):
    """A linear layer with a bias, compared with nn.Linear."""

    pattern = re.compile(r"M(\d+)x(\d+)-(\d+)", re.IGNORECASE)
    rows: int
    in_features: int
    out_features: int

    def __str__(self) -> str:
        return f"M{self.rows}x{self.in_features}-{self.out_features}"

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.rows, self.in_features)}

    @property
    def output(self) -> tuple[int, ...]:
        return self.rows, self.out_features

    @property
    def filters(self) -> int:
        return self.in_features * self.out_features

    @property
    def products(self) -> int:
        return 2 * self.rows * self.filters

    def make(self, operator: str) -> nn.Module:
        return linear(self.in_features, self.out_features, operator=operator)


class DotProductAttention(nn.Module):
    """Torch's attention as a module, the plain twin of `DecoupledAttention`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


@dataclass(frozen=True)
class AttentionShape(LayerShape):
    """Attention without projections, compared with torch's scaled_dot_product_attention."""

    pattern = re.compile(r"B(\d+)xH(\d+)xT(\d+)xD(\d+)", re.IGNORECASE)
    names = ("query", "key", "value")
    batch: int
    heads: int
    tokens: int
    features: int

    def __str__(self) -> str:
        return f"B{self.batch}xH{self.heads}xT{self.tokens}xD{self.features}"

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.names, self.output)

    @property
    def output(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.tokens, self.features

    @property
    def filters(self) -> int:
        return 0

    @property
    def products(self) -> int:
        """Those of the scores and of the weighted values."""
        return 4 * math.prod(self.output) * self.tokens

    def make(self, operator: str) -> nn.Module:
        return DotProductAttention() if is_plain(operator) else DecoupledAttention(self.heads, operator=operator)

    def obstacle(self, operator: str) -> str:
        try:
            check_operator(as_operator(operator))
        except ValueError as error:
            return str(error)
        return ""


KINDS: tuple[type[LayerShape], ...] = (Shape, SequenceShape, VolumeShape, LinearShape, AttentionShape)

# Shapes by the name of their set and by device. Linear layers and attention are from vision transformers.
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "linear": {
        "cpu": ("M1576x192-768", "M1576x768-192"),
        "cuda": ("M50432x384-1536", "M50432x1536-384", "M12608x768-768", "M8192x1024-4096"),
    },
    "depthwise": {
        "cpu": ("N4xC64x28xG64", "N4xC48x28xK7xG48"),
        "cuda": ("N64xC256x28xG256", "N64xC96x56xK7xG96"),
    },
    "pointwise": {"cpu": ("N8xC128x14xK1",), "cuda": ("N64xC256x14xK1",)},
    "attention": {"cpu": ("B4xH3xT197xD64",), "cuda": ("B64xH6xT197xD64", "B16xH6xT1024xD64")},
}


def parse_shape(text: str) -> LayerShape:
    """The shape of a layer of any kind, such as N512xC64x32, M50432x384-1536 or B64xH6xT197xD64."""
    found = next((shape for kind in KINDS if (shape := kind.read(text)) is not None), None)
    if found is None:
        raise ValueError(f"unknown shape {text!r}: {EXAMPLES}, {OTHERS}, or a set: {', '.join(SETS)}")
    return found


def expand_shapes(texts: Iterable[str], device: str) -> list[str]:
    """The shapes as records write them, without duplicates; the name of a set stands for its shapes."""
    whole = [one for text in texts for one in (SETS[text][device] if text in SETS else (text,))]
    return list(dict.fromkeys(str(parse_shape(text)) for text in whole))
