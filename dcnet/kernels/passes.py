"""The kernel launches of a fused convolution: grid, tile size and compile-time flags of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcnet.device_functions import INTERPRETED
from dcnet.kernels.filter_kernels import filter_gradient_kernel
from dcnet.kernels.launch import Launch, multiprocessors, power_of_two
from dcnet.kernels.plan import Plan, Window
from dcnet.kernels.pointwise_kernels import add_kernel, add_rows_kernel, apply_kernel, back_kernel
from dcnet.kernels.window_kernels import (
    norm_kernel,
    prepare_kernel,
    prepare_rows_kernel,
    spread_kernel,
    squares_kernel,
)
from dcnet.norms import HALF_PRECISIONS


@dataclass(frozen=True)
class Tiling:
    """Elements per tile, programs per multiprocessor, warps and pipeline stages of a pass over a tensor."""

    elements: int
    programs: int
    warps: int
    stages: int
    chunks: bool = False


# The fastest values on an H200; see README.md.
SQUARES = Tiling(4096, 0, 4, 1)
APPLY = Tiling(2048, 6, 4, 3, chunks=True)
BACK = Tiling(1024, 8, 1, 3, chunks=True)
ADD = Tiling(2048, 4, 4, 3)
PLACES = 512
MOST_SUMS = 1024
# Fewer channels of a row at once are read slowly.
FEWEST_CHANNELS = 64
# Channels per slice of wider layers, by preference.
MOST_WIDTH = 512
SLICE_WIDTHS = (512, 384, 256, 192, 128, 96, 64)
# Programs of all groups: kernels add one partial sum of each.
MOST_PROGRAMS = 1 << 14

# Codes of `Settings.mean` and `Settings.update`, which kernels compare with these numbers.
NO_MEAN, BATCH_MEAN, RUNNING_MEAN = 0, 1, 2
NO_UPDATE, RETURNED, IN_PLACE = 0, 1, 2


@dataclass(frozen=True)
class Settings:
    """Compile-time settings of the kernels, besides operator and shapes.

    Attributes:
        mean: the mean norm of relative radii: NO_MEAN, BATCH_MEAN or RUNNING_MEAN.
        update: how the running mean is updated: NO_UPDATE, RETURNED in the state, or IN_PLACE.
        counted: whether the running mean has a count of batches, which controls the warm-up of its decay.
    """

    device: torch.device
    dtype: torch.dtype
    weight_strides: tuple[int, ...]
    has_bias: bool
    eps: float
    mean: int
    update: int
    counted: bool = False

    @property
    def fast(self) -> bool:
        return self.dtype in HALF_PRECISIONS and not INTERPRETED


class FilterPasses:
    """The flags of kernels, and the launch that finishes a backward pass.

    Attributes:
        back_programs: programs that compute one row of sums over positions each.
        finish: the gradients of bias and constants, with those of the filters or without.
    """

    plan: Plan
    window: Window
    settings: Settings
    back_programs: int
    finish: dict[bool, Launch]

    @property
    def rows(self) -> int:
        """Sums over positions for every channel: constants, a and b of a weighting, and the bias."""
        return len(self.plan.summed) + 2 * self.plan.weighted + self.settings.has_bias

    @property
    def _filter_flags(self) -> dict[str, Any]:
        plan, window = self.plan, self.window
        flags = {"CHANNELS": window.channels // window.groups, "KERNEL": window.kernel, "LAST": window.channels_last}
        parts = {"KINDS": plan.kinds, "MAGNITUDE": plan.magnitude, "COUNTS": plan.counts, "SCALE": plan.scale}
        return {**flags, **parts, "WEIGHTING": plan.weighting}

    @property
    def _filter_numbers(self) -> tuple[int, ...]:
        window = self.window
        size = window.channels // window.groups * window.kernel[0] * window.kernel[1]
        return window.filters, size, *self.settings.weight_strides

    @property
    def _window_flags(self) -> dict[str, Any]:
        window = self.window
        sizes = {"KERNEL": window.kernel, "STRIDE": window.stride}
        return {**sizes, "PADDING": window.padding, "DILATION": window.dilation}

    @property
    def operator_flags(self) -> dict[str, Any]:
        """Flags of the elementwise kernels, without the angle."""
        plan, settings = self.plan, self.settings
        parts = {"MAGNITUDE": plan.magnitude, "COUNTS": plan.counts, "KNOWN": plan.known, "RELATIVE": plan.relative}
        given = {"WEIGHTED": plan.weighted, "BIAS": settings.has_bias, "MEAN": settings.mean, "FAST": settings.fast}
        return {**parts, **given}

    def _finish(self, weight: bool) -> Launch:
        plan = self.plan
        flags = {
            **self._filter_flags,
            "RELATIVE": plan.relative,
            "SUMMED": plan.summed,
            "WEIGHTED": plan.weighted,
            "BIAS": self.settings.has_bias,
            "WEIGHT": weight,
            "PROGRAMS": power_of_two(self.back_programs),
            "FAST": self.settings.fast,
        }
        numbers = (self.back_programs, *self._filter_numbers)
        return Launch(filter_gradient_kernel, (self.window.filters,), numbers, 4, **flags)


class Passes(FilterPasses):
    """The launches of one convolution, and the sizes of their partial sums.

    If every pixel is a patch, as in linear layers, `prepare_rows` and `add_rows` replace two launches each: `prepare`
    and `norms`, `spread` and `add`.
    """

    # The scale of the gradient by the norms; see `spread_kernel`.
    norm_scale = 1.0
    # Whether the channels of wide layers are divided among programs.
    sliced = True

    def __init__(self, plan: Plan, window: Window, settings: Settings):
        self.plan, self.window, self.settings = plan, window, settings
        self.slices = slices_of(window.filters) if self.sliced and window.groups == 1 else 1
        self.inputs = window.pieces(window.channels, window.pixels)
        self.outputs = cut(window.pieces(window.filters, window.outs), self.slices)
        self.patches = window.groups * window.batch * window.outs
        self.places = window.groups * window.batch * window.pixels
        self.of_rows = self.sliced and window.is_pointwise
        self.norm_sums = min(-(-self.patches // (self._row_tile[0] if self.of_rows else PLACES)), MOST_SUMS)
        self.back_programs = self._programs(BACK, self.outputs, self.slices)
        self.mean_sums = self.back_programs * window.groups * self.slices
        self.prepare, self.squares = self._prepare(), self._squares()
        self.norms, self.apply = self._norms(), self._apply()
        self.back = {from_output: self._back(from_output) for from_output in (True, False)}
        self.spread, self.add = self._spread(), self._add()
        if self.of_rows:
            self.prepare_rows, self.add_rows = self._prepare_rows(), self._add_rows()
        self.finish = {weight: self._finish(weight) for weight in (True, False)}

    def _tiles(self, tiling: Tiling, pieces: Sequence[int]) -> tuple[int, int, int]:
        """Positions per tile, channels per chunk, and tiles per group."""
        width = chunk_width(pieces[-1]) if tiling.chunks else power_of_two(min(pieces[-1], tiling.elements))
        block = power_of_two(max(tiling.elements // max(width, pieces[-1]), 1) + 1) // 2
        return block, width, pieces[0] * -(-pieces[1] // block)

    def _programs(self, tiling: Tiling, pieces: Sequence[int], slices: int = 1) -> int:
        running = tiling.programs * multiprocessors(self.settings.device) // slices
        most = min(running, MOST_PROGRAMS // self.window.groups)
        return min(self._tiles(tiling, pieces)[2], max(most, 1))

    def _pass(
        self,
        kernel: Any,
        tiling: Tiling,
        pieces: Sequence[int],
        numbers: Sequence[float],
        slices: int = 1,
        **flags: Any,
    ) -> Launch:
        block, width, _ = self._tiles(tiling, pieces)
        chunks = -(-pieces[-1] // width)
        grid = (self._programs(tiling, pieces, slices), self.window.groups * slices)
        sizes = {"ONE": self.window.channels_last, "BLOCK": block, "STAGES": tiling.stages, "SLICES": slices}
        flags["FULL"] = pieces[1] % block == 0 and pieces[-1] % width == 0
        return Launch(kernel, grid, numbers, tiling.warps, **flags, **sizes, WIDTH=width, CHUNKS=chunks)

    def _prepare(self) -> Launch:
        block, width, tiles = self._tiles(SQUARES, self.inputs)
        numbers = (*self.inputs, tiles, *self._filter_numbers, self.settings.eps)
        grid = (tiles + self.window.filters, self.window.groups)
        sizes = {"ONE": self.window.channels_last, "BLOCK": block, "WIDTH": width}
        return Launch(
            prepare_kernel, grid, numbers, SQUARES.warps, **self._filter_flags, **sizes, FAST=self.settings.fast
        )

    @property
    def _row_tile(self) -> tuple[int, int]:
        """Rows of a tile of `prepare_rows`, and the channels that are read at once."""
        width = min(row_width(self.window.channels), SQUARES.elements)
        return SQUARES.elements // width, width

    def _prepare_rows(self) -> Launch:
        block, width = self._row_tile
        numbers = (self.patches, self.window.channels, self.norm_sums, *self._filter_numbers, self.settings.eps)
        flags = {**self._filter_flags, "BLOCK": block, "WIDTH": width, "FAST": self.settings.fast}
        grid = (self.norm_sums + self.window.filters,)
        return Launch(prepare_rows_kernel, grid, numbers, SQUARES.warps, **flags)

    def _squares(self) -> Launch:
        block, width, tiles = self._tiles(SQUARES, self.inputs)
        sizes = {"ONE": self.window.channels_last, "BLOCK": block, "WIDTH": width}
        return Launch(squares_kernel, (tiles, self.window.groups), self.inputs, SQUARES.warps, **sizes)

    def _norms(self) -> Launch:
        window = self.window
        numbers = (self.patches, window.pixels, window.outs, *window.size, window.out[1], self.settings.eps)
        return Launch(norm_kernel, (self.norm_sums,), numbers, 4, **self._window_flags, BLOCK=PLACES)

    def _apply(self) -> Launch:
        plan, settings = self.plan, self.settings
        numbers = (self.norm_sums, self.patches, plan.decay or 0.0, *self.outputs, self.window.filters)
        means = {"UPDATE": settings.update, "COUNTED": settings.counted, "SUMS": power_of_two(self.norm_sums)}
        flags = {**self.operator_flags, **means, "ANGLE": plan.angle}
        return self._pass(apply_kernel, APPLY, self.outputs, numbers, self.slices, **flags)

    def _back(self, from_output: bool) -> Launch:
        plan, numbers = self.plan, (*self.outputs, self.window.filters)
        angle = {"ANGLE": plan.inverse if from_output else plan.angle, "FROM_OUTPUT": from_output}
        flags = {**self.operator_flags, **angle, "SUMMED": plan.summed}
        return self._pass(back_kernel, BACK, self.outputs, numbers, self.slices, **flags)

    def _spread(self) -> Launch:
        window, count = self.window, self.mean_sums
        sizes = (window.pixels, window.outs, window.out[0], window.size[1], window.out[1])
        flags = {
            **self._window_flags,
            "MEAN": self.settings.mean,
            "SUMS": power_of_two(count),
            "SCALE": self.norm_scale,
            "SLICES": self.slices,
        }
        flags["BLOCK"] = PLACES
        numbers = (count, self.patches, self.places, *sizes)
        return Launch(spread_kernel, (-(-self.places // PLACES),), numbers, 4, **flags)

    def _add(self) -> Launch:
        slices = self._input_slices
        pieces = cut(self.inputs, slices)
        return self._pass(add_kernel, ADD, pieces, pieces, slices)

    def _add_rows(self) -> Launch:
        pieces, count = cut(self.inputs, self._input_slices), self.mean_sums
        flags = {"MEAN": self.settings.mean, "SUMS": power_of_two(count), "PARTS": self.slices}
        return self._pass(add_rows_kernel, ADD, pieces, (count, *pieces), self._input_slices, **flags)

    @property
    def _input_slices(self) -> int:
        return slices_of(self.window.channels) if self.window.groups == 1 else 1

    @property
    def forward_launches(self) -> tuple[Launch, ...]:
        return (self.prepare_rows, self.apply) if self.of_rows else (self.prepare, self.norms, self.apply)

    def backward_launches(self, from_output: bool) -> tuple[Launch, ...]:
        by_norm = (self.add_rows,) if self.of_rows else (self.spread, self.add)
        return (self.back[from_output], *by_norm, self.finish[True])


def slices_of(channels: int) -> int:
    """The number of equal slices of at most MOST_WIDTH channels, so that their constants fit into registers."""
    if channels <= MOST_WIDTH:
        return 1
    return next((channels // width for width in SLICE_WIDTHS if channels % width == 0), 1)


def cut(pieces: Sequence[int], slices: int) -> tuple[int, ...]:
    """The `pieces` of a window, with the channels of one slice."""
    *others, channels = pieces
    return *others, channels // slices


def row_width(channels: int) -> int:
    """Channels of a row that are read at once: a power of two that leaves few lanes idle."""
    largest = channels & -channels
    return largest if largest >= FEWEST_CHANNELS else power_of_two(channels)


def chunk_width(channels: int) -> int:
    """Channels per chunk: a power of two, chosen so that 1, 3, 5 or 7 chunks leave no lane idle where possible."""
    for chunks in (1, 3, 5, 7):
        width = channels // chunks
        if width * chunks == channels and width == power_of_two(width) and width >= 16:
            return width
    return power_of_two(channels)
