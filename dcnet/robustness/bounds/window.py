"""Where the filters of a layer stand: kernel, stride, padding and groups, or none of them for rows of features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dcnet.robustness.bounds.matrices import convolution_norm, copies, overlap, repeats
from dcnet.robustness.bounds.signal import Signal


@dataclass(frozen=True)
class Window:
    """How patches are taken from values of the given sides.

    Args:
        sides: of the input; () for rows of features.
        kernel: one number a side, like the others.
        stride: of the patches.
        dilation: of the taps.
        ends: padding as `F.pad` takes it, from the last side to the first.
        mode: of the padding.
        groups: into which channels are divided.
    """

    sides: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    mode: str = "zeros"
    groups: int = 1

    @property
    def padded(self) -> tuple[int, ...]:
        before, after = self.ends[-2::-2], self.ends[::-2]
        return tuple(side + a + b for side, a, b in zip(self.sides, before, after, strict=True))

    @property
    def outputs(self) -> tuple[int, ...]:
        sizes = zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((side - gap * (size - 1) - 1) // step + 1 for side, size, step, gap in sizes)

    @property
    def zeros(self) -> bool:
        """Whether patches hold zeros that the values need not hold."""
        return self.mode == "zeros" and any(self.ends)

    @property
    def repeated(self) -> float:
        """How much larger all patches together are, in L2, than the values, at most."""
        return math.sqrt(overlap(self.kernel, self.stride, self.dilation)) * self._padding

    @property
    def lengthened(self) -> float:
        """How much larger one patch is, in L2, than the values, at most: of copies it may hold several."""
        return math.sqrt(copies(self.sides, self.kernel, self.stride, self.dilation, self.ends, self.mode))

    @property
    def _padding(self) -> float:
        return math.sqrt(repeats(self.sides, self.ends, self.mode))

    def norm(self, weight: Tensor) -> float:
        """The L2 norm of the convolution with these filters, from above."""
        return self._padding * convolution_norm(weight, self.groups, self.stride, self.dilation, self.padded)

    def per_filter(self, values: Tensor, filters: int) -> Tensor:
        """Values of channels, as the filters meet them: [channels] -> [filters, channels of a group]."""
        met = values.view(self.groups, 1, -1).expand(-1, filters // self.groups, -1)
        return met.reshape(filters, -1)


def window_of(layer: nn.Module, signal: Signal) -> Window:
    """The window of a convolution or of a fully connected layer on these values, or a ValueError of one clause."""
    if isinstance(layer, _ConvNd):
        _check(signal, layer.in_channels, len(layer.kernel_size) + 1, "channels")
        window = Window(
            signal.shape[1:],
            layer.kernel_size,
            layer.stride,
            layer.dilation,
            tuple(layer._reversed_padding_repeated_twice),
            layer.padding_mode,
            layer.groups,
        )
        _check_room(window.outputs, signal.shape)
        return window
    _check(signal, int(layer.in_features), 1, "features")  # type: ignore[arg-type]
    return Window()


def _check(signal: Signal, expected: int, dims: int, what: str) -> None:
    if len(signal.shape) != dims or signal.channels != expected:
        raise ValueError(
            f"takes {expected} {what}, and gets {list(signal.shape)} of an image: give the image_size and channels "
            "that the network was made for"
        )


def _check_room(outputs: Sequence[int], shape: Sequence[int]) -> None:
    if min(outputs) < 1:
        raise ValueError(f"has a kernel that does not fit into {list(shape)}: give a larger image_size")
