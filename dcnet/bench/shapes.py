"""The layers that are timed, and the least time that any implementation of one could take."""

import re
from dataclasses import dataclass
from typing import Self

PATTERN = re.compile(r"N(\d+)xC(\d+)x(\d+)(?:x(\d+))?(?:xK(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches at best: bytes and floating-point operations a second."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """What cannot be avoided: every input read once, every output written once, every product formed."""

    bytes: int
    flops: int

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The milliseconds of the slower one of moving the bytes and computing, if both happen at once."""
        return 1000 * max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


@dataclass(frozen=True)
class Shape:
    """A square filter that keeps the size of the images, with as many filters as channels, stride 1 and no bias."""

    batch: int
    channels: int
    height: int
    width: int
    kernel: int = 3

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shape of a text such as N512xC64x32, N8xC3x32x48 or N8xC3x32xK5."""
        found = PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(
                f"unknown shape {text!r}: write N512xC64x32 for 512 images of 64 channels and 32x32 pixels, "
                "N512xC64x32x48 if they are not square, and N512xC64x32xK5 for 5x5 filters"
            )
        batch, channels, height = (int(number) for number in found.groups()[:3])
        shape = cls(batch, channels, height, int(found[4] or height), int(found[5] or 3))
        if min(batch, channels, height, shape.width) < 1:
            raise ValueError(f"a shape needs numbers from 1 on, not {text!r}")
        if shape.kernel % 2 == 0:
            raise ValueError(f"filters need an odd number after K, so that images keep their size, not {text!r}")
        return shape

    def __str__(self) -> str:
        size = f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"
        return f"N{self.batch}xC{self.channels}x{size}" + ("" if self.kernel == 3 else f"xK{self.kernel}")

    @property
    def images(self) -> tuple[int, int, int, int]:
        """The shape of the input, and of the output."""
        return self.batch, self.channels, self.height, self.width

    def forward(self, itemsize: int) -> Work:
        """Reads images and filters, writes the output."""
        return Work((2 * self._image_values + self._filter_values) * itemsize, self._products)

    def backward(self, itemsize: int) -> Work:
        """Reads images, filters and the gradient of the output, writes the gradients of images and filters."""
        return Work((3 * self._image_values + 2 * self._filter_values) * itemsize, 2 * self._products)

    def floors(self, itemsize: int, ceilings: Ceilings) -> dict[str, float]:
        """The least milliseconds of the forward pass, and of forward and backward, which come one after the other."""
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
