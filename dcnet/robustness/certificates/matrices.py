"""Bounds that propagate through a network, and upper bounds of the norms of convolutions.

They do not use power iteration, which underestimates the norm until it converges.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Every norm is multiplied by this, to cover the rounding error of float64, about 1e-13.
SLACK = 1 + 1e-9
# The largest number of complex values in the spectrum of a convolution; above it only other bounds are used.
LARGEST_SPECTRUM = 2**26


@dataclass(frozen=True)
class Signal:
    """Bounds on values inside a network: their movement for a perturbation of size 1, and their range for any image.

    Args:
        shape: the shape of the values of one image: channels and spatial size, or features.
        linf: a bound on the movement of a value of each channel, [channels].
        low: a lower bound of the values of each channel, [channels]; -inf if there is none.
        high: an upper bound.
        stretched: takes a scale per channel, [channels], and returns a bound on the L2 movement of all scaled values;
            this way a scale is multiplied into the filters before it.
        differences: returns bounds on the movement of the difference of any two values, and on its range for any two
            images, both [features, features]; None if only bounds of single values are known.
    """

    shape: tuple[int, ...]
    linf: Tensor
    low: Tensor
    high: Tensor
    stretched: Callable[[Tensor], float]
    differences: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def places(self) -> int:
        """The number of values per channel."""
        return math.prod(self.shape[1:])

    @cached_property
    def l2(self) -> float:
        """A bound on the L2 movement of all values."""
        from_each = math.sqrt(self.places * float(self.linf.square().sum()))
        return min(self.stretched(torch.ones_like(self.linf)), from_each)

    @cached_property
    def moved(self) -> Tensor:
        """A bound on the movement of a value of each channel: the smaller of `linf` and `l2`."""
        return self.linf.clamp(max=self.l2)

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    @property
    def bounded(self) -> bool:
        return bool(self.width.isfinite().all())

    def scaled(self, scale: Tensor, shift: Tensor | float = 0.0) -> "Signal":
        """Bounds on the values times a scale per channel, plus a shift."""
        ends = torch.stack((product(scale, self.low), product(scale, self.high)))
        low, high = ends.amin(0) + shift, ends.amax(0) + shift
        return Signal(
            self.shape, self.linf * scale.abs(), low, high, lambda further: self.stretched(scale.abs() * further.abs())
        )

    def pair_bounds(self) -> tuple[Tensor, Tensor]:
        """Bounds on the movement of the difference of two values, and on its range; [features, features] each."""
        moved, width = self.moved, self.width
        lipschitz = (moved[:, None] + moved[None, :]).clamp(max=math.sqrt(2) * self.l2)
        spread = width[:, None] + width[None, :]
        if self.differences is not None:
            closer = self.differences()
            lipschitz, spread = torch.minimum(lipschitz, closer[0]), torch.minimum(spread, closer[1])
        # The product over very many layers may overflow; then there is no bound.
        lipschitz = lipschitz.nan_to_num(nan=math.inf, posinf=math.inf)
        return lipschitz.fill_diagonal_(0), spread.fill_diagonal_(0)


def product(scale: Tensor, end: Tensor) -> Tensor:
    """scale * end, which is zero for a scale of zero, even if the end is infinite."""
    return (scale * end).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def together(l2: float) -> Callable[[Tensor], float]:
    """`Signal.stretched` for values of which only an L2 bound is known."""
    return lambda scale: l2 * float(scale.abs().max())


def first_signal(shape: Sequence[int], norm: str, device: torch.device) -> Signal:
    """The signal of the input: an image of any values, which moves by 1 in the norm."""
    ones = torch.ones(shape[0], dtype=torch.float64, device=device)
    l2 = 1.0 if norm == "l2" else math.sqrt(math.prod(shape))
    unknown = torch.full_like(ones, math.inf)
    return Signal(tuple(shape), ones, -unknown, unknown, together(l2))


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution.

    Args:
        sides: the spatial size of the input; () for features.
        kernel: the kernel size; one number per dimension, as for stride and dilation.
        stride: the stride.
        dilation: the dilation.
        ends: the padding as `F.pad` takes it, from the last dimension to the first.
        mode: the padding mode.
        groups: the number of groups of channels.
    """

    sides: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    mode: str = "zeros"
    groups: int = 1

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The padding before and after each dimension, from the first to the last."""
        return list(zip(self.ends[-2::-2], self.ends[::-2], strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(side + before + after for side, (before, after) in zip(self.sides, self.padding, strict=True))

    @property
    def outputs(self) -> tuple[int, ...]:
        sizes = zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((side - gap * (size - 1) - 1) // step + 1 for side, size, step, gap in sizes)

    @property
    def zeros(self) -> bool:
        """Whether padding adds zeros to patches."""
        return self.mode == "zeros" and any(self.ends)

    @property
    def copying(self) -> bool:
        """Whether padding adds copies of values."""
        return self.mode != "zeros" and any(self.ends)

    @property
    def copies(self) -> int:
        """The largest number of copies of one value after padding."""
        if not self.copying:
            return 1
        with torch.enable_grad():
            ones = torch.ones(1, 1, *self.sides, dtype=torch.float64, requires_grad=True)
            (counts,) = torch.autograd.grad(F.pad(ones, list(self.ends), mode=self.mode).sum(), ones)
        return round(float(counts.max()))

    @property
    def copies_in_patch(self) -> int:
        """The largest number of copies of one value in one patch."""
        if not self.copying:
            return 1
        counts = []
        dimensions = zip(self.sides, self.kernel, self.stride, self.dilation, self.padding, strict=True)
        for side, size, step, gap, ends in dimensions:
            places = F.pad(torch.arange(side, dtype=torch.float64)[None, None], ends, mode=self.mode)[0, 0]
            patches = places.unfold(0, gap * (size - 1) + 1, step)[:, ::gap]
            counts.append(int((patches[:, :, None] == patches[:, None, :]).sum(2).max()))
        return math.prod(counts)

    @property
    def repeated(self) -> float:
        """A bound on the L2 norm of all patches together, divided by that of the values."""
        return math.sqrt(overlap(self.kernel, self.stride, self.dilation)) * math.sqrt(self.copies)

    @property
    def lengthened(self) -> float:
        """A bound on the L2 norm of one patch, divided by that of the values."""
        return math.sqrt(self.copies_in_patch)

    def norm(self, weight: Tensor) -> float:
        """An upper bound of the L2 norm of the convolution with these filters: the smallest of three bounds."""
        grouped = weight.unflatten(0, (self.groups, -1))
        size = grouped.abs().flatten(3) if weight.dim() > 2 else grouped.abs().unsqueeze(3)
        # Schur's test: the largest row sum times the largest column sum.
        schur = math.sqrt(float(size.sum((2, 3)).max()) * float(size.sum((1, 3)).max())) * SLACK
        largest = float(torch.linalg.matrix_norm(grouped.flatten(2), 2).max()) * SLACK
        bounds = [schur, largest * math.sqrt(overlap(self.kernel, self.stride, self.dilation))]
        numbers = weight.shape[0] * weight.shape[1] * math.prod(self.padded)
        if math.prod(self.kernel) > 1 and numbers <= LARGEST_SPECTRUM:
            bounds.append(self._circular_norm(grouped))
        return math.sqrt(self.copies) * min(bounds)

    def _circular_norm(self, grouped: Tensor) -> float:
        """The norm of the circular convolution of the padded size, of which the convolution is a submatrix.

        The Fourier transform splits it into one matrix per frequency; the conjugate half is left out.
        """
        sizes = zip(self.kernel, self.dilation, strict=True)
        taps: list[Any] = [slice(0, gap * (size - 1) + 1, gap) for size, gap in sizes]
        spread = grouped.new_zeros(*grouped.shape[:3], *self.padded)
        spread[(..., *taps)] = grouped
        spectrum = torch.fft.rfftn(spread, dim=tuple(range(3, grouped.dim()))).flatten(3)
        matrices = spectrum.permute(0, 3, 1, 2).flatten(0, 1)
        matrices = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
        # The eigenvalues of A A* take a third of the time of the singular values of A.
        largest = torch.linalg.eigvalsh(matrices @ matrices.mH)[:, -1].max()
        return math.sqrt(max(float(largest), 0.0)) * SLACK

    def per_filter(self, values: Tensor, filters: int) -> Tensor:
        """The values of the channels that each filter reads: [channels] -> [filters, channels of a group]."""
        return values.view(self.groups, 1, -1).expand(-1, filters // self.groups, -1).reshape(filters, -1)

    def patch_length(self, values: Tensor, filters: int) -> Tensor:
        """The L2 norm of a patch with these values, one per channel; [filters]."""
        return (self.per_filter(values, filters).square().sum(1) * math.prod(self.kernel)).sqrt()


def overlap(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """The largest number of windows that contain one value: the taps that coincide modulo the stride, per dimension."""
    counts = []
    for size, step, gap in zip(kernel, stride, dilation, strict=True):
        places = [tap * gap % step for tap in range(size)]
        counts.append(max(places.count(place) for place in places))
    return math.prod(counts)


def window_of(layer: nn.Module, signal: Signal) -> Window:
    """The window of a convolution or of a fully connected layer on these values."""
    if not isinstance(layer, _ConvNd):
        _check_input(signal, int(layer.in_features), 1, "features")  # type: ignore[arg-type]
        return Window()
    _check_input(signal, layer.in_channels, len(layer.kernel_size) + 1, "channels")
    window = Window(
        signal.shape[1:],
        layer.kernel_size,
        layer.stride,
        layer.dilation,
        tuple(layer._reversed_padding_repeated_twice),
        layer.padding_mode,
        layer.groups,
    )
    if min(window.outputs) < 1:
        raise ValueError(f"has a kernel that does not fit into {list(signal.shape)}: give a larger image_size")
    return window


def _check_input(signal: Signal, expected: int, dims: int, what: str) -> None:
    if len(signal.shape) != dims or signal.channels != expected:
        raise ValueError(
            f"takes {expected} {what}, but gets {list(signal.shape)} per image: give the image_size and channels of "
            "the network"
        )
