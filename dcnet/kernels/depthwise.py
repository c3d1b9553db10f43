"""Depthwise convolutions: inner products and norms in one pass over the input, computed again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcnet.kernels.depthwise_gradient_kernels import (
    depthwise_back_kernel,
    depthwise_gradient_kernel,
    depthwise_sum_kernel,
)
from dcnet.kernels.depthwise_kernels import depthwise_output_kernel, depthwise_prepare_kernel
from dcnet.kernels.fused_layer import FusedLayer, Gradients, state_memory
from dcnet.kernels.launch import Launch, Memory, aligned, device_guard, multiprocessors, power_of_two, raw_stream
from dcnet.kernels.passes import BATCH_MEAN, IN_PLACE, MOST_PROGRAMS, FilterPasses, Settings
from dcnet.kernels.plan import Plan, Window

if TYPE_CHECKING:
    from dcnet.kernels.convolution import Call


@dataclass(frozen=True)
class Tiling:
    """Most rows of a tile, elements per row, channels if they are contiguous, warps, programs per multiprocessor."""

    rows: int
    elements: int
    channels: int
    warps: int
    programs: int


# By pass; the second tiling of each is for windows of more than SMALL_WINDOW positions.
SMALL_WINDOW = 9
TILINGS: dict[str, tuple[Tiling, Tiling]] = {
    "prepare": (Tiling(4, 1024, 64, 8, 4), Tiling(8, 1024, 32, 4, 4)),
    "output": (Tiling(4, 512, 64, 4, 8), Tiling(8, 512, 32, 4, 4)),
    "back": (Tiling(4, 512, 64, 4, 8), Tiling(8, 512, 32, 4, 4)),
    "gradient": (Tiling(4, 256, 64, 4, 4), Tiling(2, 256, 32, 4, 4)),
    "input": (Tiling(4, 512, 64, 4, 4), Tiling(8, 256, 32, 4, 4)),
    "weight": (Tiling(4, 512, 64, 4, 4), Tiling(8, 256, 32, 4, 4)),
}
# Whether one launch computes the gradients of input and filters, which needs more registers, or two.
BOTH_GRADIENTS = (True, False)
# Channels per tile if they are contiguous, or else columns: fewer would not use whole sectors of memory.
FEWEST = 16
# Partial sums of the filters' gradients: programs and channels that are added at once.
SUM_BLOCK, SUM_WIDTH = 64, 32
# The tilings of a launch for the gradients of input and filters, by those that are wanted.
GRADIENTS = {(True, True): "gradient", (True, False): "input", (False, True): "weight"}


@dataclass(frozen=True)
class Tiles:
    """The tiles of one pass over images of a size: rows, columns and channels of each, and how many there are."""

    rows: int
    columns: int
    channels: int
    row_blocks: int
    column_blocks: int
    channel_blocks: int
    count: int
    programs: int
    warps: int

    @classmethod
    def of(cls, name: str, window: Window, size: tuple[int, int], step: int, device: torch.device) -> Tiles:
        """With a `step` above 1, the stride of gradients with respect to pixels, rows cannot share what they read."""
        tiling = TILINGS[name][window.kernel[0] * window.kernel[1] > SMALL_WINDOW]
        rows = 1 if step > 1 else balanced(size[0], tiling.rows)
        columns, channels = tile_shape(tiling, size[1], window.channels, window.channels_last)
        blocks = (-(-size[0] // rows), -(-size[1] // columns), -(-window.channels // channels))
        count = window.batch * blocks[0] * blocks[1]
        most = min(tiling.programs * multiprocessors(device), MOST_PROGRAMS) // blocks[2]
        return cls(rows, columns, channels, *blocks, count, min(count, max(most, 1)), tiling.warps)

    @property
    def sums(self) -> int:
        """Partial sums, one for each program."""
        return self.programs * self.channel_blocks

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.count, self.row_blocks, self.column_blocks

    @property
    def flags(self) -> dict[str, int]:
        return {"ROWS": self.rows, "BLOCK": self.columns, "WIDTH": self.channels}


def balanced(size: int, most: int) -> int:
    """The number of rows of a tile, up to a limit, that leaves few rows of the last tile empty."""
    return -(-size // -(-size // most))


def tile_shape(tiling: Tiling, width: int, channels: int, channels_last: bool) -> tuple[int, int]:
    """Columns and channels of a tile, powers of two that leave few lanes idle."""
    limits = power_of_two(width), power_of_two(channels)
    wanted = tiling.channels if channels_last else tiling.elements // min(limits[0], 64)
    fewest = (1, min(FEWEST, limits[1])) if channels_last else (min(FEWEST, limits[0]), 1)
    best, lowest = (1, 1), (float("inf"), 0.0)
    for many in itertools.takewhile(lambda many: many <= limits[1], (1 << i for i in range(32))):
        columns = min(max(tiling.elements // many, 1), limits[0])
        if columns >= fewest[0] and many >= fewest[1] and many <= tiling.elements:
            # Lanes for one row of the image; a tile that is too small leaves threads idle.
            lanes = -(-width // columns) * -(-channels // many) * max(columns * many, tiling.elements)
            ratio = max(many, wanted) / min(many, wanted) if wanted else float(many)
            if (lanes, ratio) < lowest:
                best, lowest = (columns, many), (lanes, ratio)
    return best


def rows_read(rows: int, stride: int, kernel: int, dilation: int) -> tuple[bool, ...]:
    """For all rows of the input from the first to the last that a tile sees, whether it sees them."""
    seen = {r * stride + i * dilation for r in range(rows) for i in range(kernel)}
    return tuple(k in seen for k in range(max(seen) + 1))


class DepthwisePasses(FilterPasses):
    """The launches of one depthwise convolution, and the sizes of their partial sums."""

    def __init__(self, plan: Plan, window: Window, settings: Settings):
        self.plan, self.window, self.settings = plan, window, settings
        self.taps = window.kernel[0] * window.kernel[1]
        self.patches = window.filters * window.batch * window.outs
        device = settings.device
        self.norm_tiles = Tiles.of("prepare", window, window.out, 1, device)
        self.out_tiles = Tiles.of("output", window, window.out, 1, device)
        self.back_tiles = Tiles.of("back", window, window.out, 1, device)
        self.pixel_tiles = {
            wanted: Tiles.of(name, window, window.size, max(window.stride), device)
            for wanted, name in GRADIENTS.items()
        }
        self.both_gradients = BOTH_GRADIENTS[self.taps > SMALL_WINDOW]
        self.back_programs = self.back_tiles.programs
        self.norm_sums = self.norm_tiles.sums if settings.mean == BATCH_MEAN else 0
        self.prepare, self.output, self.back = self._prepare(), self._output(), self._back()
        self.gradient = {wanted: self._gradient(*wanted) for wanted in GRADIENTS}
        self.sum = {wanted: self._sum(wanted) for wanted in GRADIENTS}
        self.finish = {weight: self._finish(weight) for weight in (True, False)}

    @property
    def _input(self) -> tuple[int, int, int]:
        """The strides of image, pixel and channel."""
        window = self.window
        within = (window.channels, 1) if window.channels_last else (1, window.pixels)
        return window.channels * window.pixels, *within

    @property
    def _shapes(self) -> tuple[int, ...]:
        """Sizes and strides of input and output, and the number of channels."""
        window = self.window
        out = (window.channels * window.outs, 1 if window.channels_last else window.outs)
        return *window.size, *window.out, *self._input, *out, window.channels

    def _reading(self, tiles: Tiles) -> dict[str, Any]:
        window = self.window
        read = rows_read(tiles.rows, window.stride[0], window.kernel[0], window.dilation[0])
        return {**self._window_flags, **tiles.flags, "READ": read}

    def _prepare(self) -> Launch:
        window, tiles, settings = self.window, self.norm_tiles, self.settings
        programs = tiles.programs if settings.mean == BATCH_MEAN else 0
        sizes = (*window.size, *window.out, *self._input)
        numbers = (programs, tiles.channel_blocks, *tiles.numbers, *sizes, *self._filter_numbers, settings.eps)
        flags = {**self._filter_flags, **self._reading(tiles), "FAST": settings.fast}
        return Launch(depthwise_prepare_kernel, (self.norm_sums + window.filters,), numbers, tiles.warps, **flags)

    def _output(self) -> Launch:
        plan, settings, tiles = self.plan, self.settings, self.out_tiles
        means = {"UPDATE": settings.update, "COUNTED": settings.counted, "SUMS": power_of_two(self.norm_sums)}
        numbers = (self.norm_sums, self.patches, plan.decay or 0.0, settings.eps, *tiles.numbers, *self._shapes)
        flags = {**self._reading(tiles), **self.operator_flags, **means, "ANGLE": plan.angle}
        grid = (tiles.programs, tiles.channel_blocks)
        return Launch(depthwise_output_kernel, grid, numbers, tiles.warps, **flags)

    def _back(self) -> Launch:
        plan, tiles = self.plan, self.back_tiles
        numbers = (self.settings.eps, *tiles.numbers, *self._shapes)
        flags = {**self._reading(tiles), **self.operator_flags, "ANGLE": plan.angle, "SUMMED": plan.summed}
        grid = (tiles.programs, tiles.channel_blocks)
        return Launch(depthwise_back_kernel, grid, numbers, tiles.warps, **flags)

    def _gradient(self, input: bool, weight: bool) -> Launch:
        window, tiles = self.window, self.pixel_tiles[input, weight]
        numbers = (self.back_tiles.sums, self.patches, *tiles.numbers, *self._shapes)
        read = rows_read(tiles.rows, 1, window.kernel[0], window.dilation[0])
        wanted = {"INPUT": input, "WEIGHT": weight, "READ": read, "EVERY": (True,) * tiles.rows}
        means = {"MEAN": self.settings.mean, "SUMS": power_of_two(self.back_tiles.sums)}
        flags = {**self._window_flags, **tiles.flags, **wanted, **means}
        grid = (tiles.programs, tiles.channel_blocks)
        return Launch(depthwise_gradient_kernel, grid, numbers, tiles.warps, **flags)

    def _sum(self, wanted: tuple[bool, bool]) -> Launch:
        """The sum of what all programs of the launch of these gradients add to the filters' gradient."""
        flags, channels = {"TAPS": self.taps, "BLOCK": SUM_BLOCK, "WIDTH": SUM_WIDTH}, self.window.channels
        grid = (self.taps, -(-channels // SUM_WIDTH))
        return Launch(depthwise_sum_kernel, grid, (self.pixel_tiles[wanted].programs, channels), 4, **flags)


class Depthwise(FusedLayer):
    """Forward and backward pass of one depthwise convolution, compiled for one operator, shape, layout and dtype.

    As in `Convolution`, the state has the channel table and the mean norms, but no norms. There are no inner products
    to save either: the backward pass computes both from the input. Normalized filters are float32, see `unit_shape`.
    """

    passes: DepthwisePasses
    keeps_output = False

    def __init__(self, plan: Plan, window: Window, settings: Settings):
        if min(window.out) < 1:
            padded = tuple(size + 2 * pad for size, pad in zip(window.size, window.padding, strict=True))
            given = f"a window of {window.kernel} with dilation {window.dilation}"
            raise RuntimeError(f"{given} needs an input of at least its size, not {padded} with padding")
        self.plan, self.window, self.passes = plan, window, DepthwisePasses(plan, window, settings)
        passes, filters = self.passes, window.filters
        self.state = state_memory(plan, window)
        self.forward_scratch = Memory(max(passes.norm_sums, 1))
        sums = passes.back_programs * passes.rows * filters
        programs = max(tiles.programs for tiles in passes.pixel_tiles.values())
        self.backward_scratch = Memory(sums, passes.back_tiles.sums, programs * passes.taps * filters)

    def forward(self, call: Call, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, no inner products, the normalized filters, and the state."""
        x, w, bias, constants, running, tracked, *_ = self.laid_out(call)
        passes, device, ok = self.passes, x.device, aligned(x, w, bias, running, tracked, *constants)
        with device_guard(x):
            state, scratch = self.state.allocate(device), self.forward_scratch.allocate(device)
            (_, table, kept), (sums,) = self.state.places(state), self.forward_scratch.places(scratch)
            unit = torch.empty(unit_shape(self.window), dtype=torch.float32, device=device)
            output, stream = self.window.empty_output(x), raw_stream(device)
            passes.prepare(x, sums, w, unit, table, self.plan.stored(constants), stream=stream, aligned=ok)
            means = (sums, table if running is None else running, table if tracked is None else tracked)
            given = (x, unit, table, table if bias is None else bias, *means)
            passes.output(*given, output, kept, stream=stream, aligned=ok)
        if running is not None and passes.settings.update == IN_PLACE:
            torch.autograd.graph.increment_version([value for value in (running, tracked) if value is not None])
        return output, x.new_empty(0), unit, state

    def backward(
        self,
        call: Call,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        from_output: bool,
        needs_input: bool,
        needs_weight: bool,
    ) -> Gradients:
        """The gradients of input, filters, bias and stored constants; inner products and `from_output` are not used."""
        call, gradient = self.laid_out(call), gradient.contiguous(memory_format=self.window.format)
        x, w, bias, constants, *_ = call
        unit, passes = saved[1].contiguous(), self.passes
        ok = aligned(gradient, x, w, bias, unit, *constants)
        (_, table, kept), scratch = self.state.places(saved[2]), self.backward_scratch.allocate(x.device)
        sums, mean_sums, partial = self.backward_scratch.places(scratch)
        with device_guard(x):
            stream = raw_stream(x.device)
            by_patch = self._gradients_by_patch(gradient)
            given = (gradient, x, unit, table, kept)
            passes.back(*given, *by_patch, sums, mean_sums, stream=stream, aligned=ok)
            input_gradient = torch.empty_like(x) if needs_input else x.new_empty(0)
            outs = (input_gradient if needs_input else x, partial)
            unit_gradient = torch.empty(w.shape, dtype=torch.float32, device=x.device) if needs_weight else None
            for wanted in self._launches(needs_input, needs_weight):
                passes.gradient[wanted](*by_patch, mean_sums, x, unit, *outs, stream=stream, aligned=ok)
                if wanted[1]:
                    passes.sum[wanted](partial, unit_gradient, stream=stream, aligned=True)
            rest = self.finish(w, bias, constants, (table, kept, sums), ok, unit_gradient, stream)
        return input_gradient, *rest

    def _launches(self, needs_input: bool, needs_weight: bool) -> list[tuple[bool, bool]]:
        """The launches for the gradients of input and filters, as keys of `GRADIENTS`."""
        if needs_input and needs_weight and not self.passes.both_gradients:
            return [(True, False), (False, True)]
        return [(needs_input, needs_weight)] if needs_input or needs_weight else []

    def _gradients_by_patch(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for dz, dn / n and 1 / n of every patch; the last is not used without a gradient of the mean norm.

        float16 has too small a range for the norms.
        """
        dtype = torch.float32 if gradient.dtype == torch.float16 else gradient.dtype
        by_norm = torch.empty_like(gradient, dtype=dtype)
        has_mean = self.passes.settings.mean == BATCH_MEAN
        return torch.empty_like(gradient), by_norm, torch.empty_like(by_norm) if has_mean else by_norm


def unit_shape(window: Window) -> Sequence[int]:
    """The shape of normalized filters: positions in the window, and channels."""
    return window.kernel[0] * window.kernel[1], window.channels
