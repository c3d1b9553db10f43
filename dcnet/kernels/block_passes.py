"""The kernel launches of a fused block, and the settings that they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.kernels.activations import NO_ACTIVATION, PRELU
from dcnet.kernels.block_gradient_kernels import block_back_kernel, rows_gradient_kernel, sums_kernel
from dcnet.kernels.block_kernels import block_kernel, rows_kernel, statistics_kernel
from dcnet.kernels.launch import Launch, power_of_two
from dcnet.kernels.passes import IN_PLACE, NO_UPDATE, Passes, Settings, Tiling
from dcnet.kernels.plan import Plan, Window
from dcnet.kernels.window_kernels import prepare_kernel

# The fastest values on an H200, by the smallest number of channels that they are for; see README.md.
STATISTICS = {0: Tiling(1024, 8, 1, 3, chunks=True)}
OUTPUT = {0: Tiling(2048, 6, 4, 3, chunks=True), 256: Tiling(1024, 12, 1, 3, chunks=True)}
SUMS = {0: Tiling(2048, 4, 2, 3, chunks=True), 192: Tiling(1024, 8, 1, 3, chunks=True)}
BLOCK_BACK = {0: Tiling(2048, 6, 4, 3, chunks=True), 192: Tiling(512, 16, 1, 3, chunks=True)}
# Channels per program of the kernels between the passes.
ROW_WIDTH = 8
# Rows of a block: scale, offset, slope, mean, 1 / deviation and shift.
ROWS = 6

# The new running statistics in `FusedBlock.updated`.
UPDATED = 32

# Codes that kernels compare with these numbers.
NO_NORM, BATCH_NORM, RUNNING_NORM = 0, 1, 2


@dataclass(frozen=True)
class BlockSettings:
    """What follows the convolution of a block.

    Attributes:
        norm: NO_NORM, BATCH_NORM (statistics of the batch) or RUNNING_NORM (running statistics).
        eps: epsilon of the normalization.
        momentum: weight of the newest batch in the running statistics; None for their cumulative average.
        update: how the running statistics are updated: NO_UPDATE, RETURNED or IN_PLACE.
        affine: whether the normalization has a weight and a bias.
        bias: whether the convolution has a bias.
        activation: a code of `activations`.
        shared: whether one slope of PReLU serves all channels.
        residual: whether a residual is added before the activation.
        given: whether the sums of squares of the input are given.
        hands_on: whether the sums of squares of the output are returned.
    """

    norm: int = NO_NORM
    eps: float = 0.0
    momentum: float | None = 0.1
    update: int = NO_UPDATE
    affine: bool = False
    bias: bool = False
    activation: int = NO_ACTIVATION
    shared: bool = False
    residual: bool = False
    given: bool = False
    hands_on: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether anything per channel follows the convolution: a normalization, a bias or slopes."""
        return self.norm != NO_NORM or self.bias or self.activation == PRELU

    @property
    def has_sums(self) -> bool:
        """Whether the backward pass needs sums over positions, or dv, before the gradient of the convolution."""
        return self.norm == BATCH_NORM or self.affine or self.bias or self.activation == PRELU or self.residual

    @property
    def needs_output(self) -> bool:
        """Whether the backward pass needs the output: with a residual, v cannot be computed from z alone."""
        return self.residual and (self.activation != NO_ACTIVATION or self.hands_on)

    @property
    def slopes(self) -> int:
        """0 without PReLU, 1 for a shared slope, 2 for one per channel."""
        return 0 if self.activation != PRELU else 1 if self.shared else 2


class BlockPasses(Passes):
    """The launches of a fused block."""

    sliced = False

    def __init__(self, plan: Plan, window: Window, settings: Settings, block: BlockSettings):
        self.block = block
        self.norm_scale = 0.5 if block.given else 1.0
        super().__init__(plan, window, settings)
        self.filters = self._filters()
        self.statistic_programs = self._output_programs(STATISTICS)
        self.sum_programs = self._output_programs(SUMS)
        self.back_programs = self._output_programs(BLOCK_BACK)
        self.mean_sums = self.back_programs
        self.positions = window.batch * window.outs
        self.spread = self._spread()
        self.finish = {weight: self._finish(weight) for weight in (True, False)}
        self.statistics, self.make_rows, self.output = self._statistics(), self._make_rows(), self._output()
        self.row_gradients = self._row_gradients()
        both = (True, False)
        self.sums = {(handed, two): self._sums(handed, two) for handed in both for two in both}
        self.block_back = {(handed, direct): self._block_back(handed, direct) for handed in both for direct in both}

    @property
    def sum_rows(self) -> int:
        return 3 if self.block.activation == PRELU else 2

    def _filters(self) -> Launch:
        """Normalizes the filters; the sums of squares of the input are known."""
        numbers = (*self.inputs, 0, *self._filter_numbers, self.settings.eps)
        sizes = {"ONE": True, "BLOCK": 16, "WIDTH": 16, "FAST": self.settings.fast}
        return Launch(prepare_kernel, (self.window.filters, 1), numbers, 4, **self._filter_flags, **sizes)

    def _tiling(self, tilings: Mapping[int, Tiling]) -> Tiling:
        return tilings[max(channels for channels in tilings if channels <= self.window.filters)]

    def _output_programs(self, tilings: Mapping[int, Tiling]) -> int:
        return self._programs(self._tiling(tilings), self.outputs)

    def _block_pass(self, kernel: Any, tilings: Mapping[int, Tiling], numbers: Sequence[float], **flags: Any) -> Launch:
        """A pass over the output."""
        functions = {**self.operator_flags, "ANGLE": self.plan.angle}
        return self._pass(kernel, self._tiling(tilings), self.outputs, numbers, **functions, **flags)

    @property
    def _mean_flags(self) -> dict[str, Any]:
        settings = self.settings
        return {"UPDATE": settings.update, "COUNTED": settings.counted, "SUMS": power_of_two(self.norm_sums)}

    @property
    def _mean_numbers(self) -> tuple[float, ...]:
        return self.norm_sums, self.patches, self.plan.decay or 0.0

    @property
    def _block_flags(self) -> dict[str, Any]:
        block = self.block
        return {"AFFINE": int(block.has_rows), "ACTIVATION": block.activation, "RESIDUAL": block.residual}

    def _statistics(self) -> Launch:
        flags = {"COUNTS_BATCH": self.block.update == IN_PLACE, **self._mean_flags}
        return self._block_pass(statistics_kernel, STATISTICS, (*self._mean_numbers, *self.outputs), **flags)

    @property
    def _row_grid(self) -> tuple[int]:
        return (-(-self.window.filters // ROW_WIDTH),)

    def _make_rows(self) -> Launch:
        block = self.block
        cumulative = block.momentum is None
        numbers = (self.statistic_programs, self.window.filters, self.positions, block.eps, block.momentum or 0.0)
        flags = {"NORM": block.norm, "AFFINE": block.affine, "BIAS": block.bias, "PRELU": block.slopes}
        sizes = {"PROGRAMS": power_of_two(self.statistic_programs), "WIDTH": ROW_WIDTH}
        updates = {"UPDATE": block.update, "CUMULATIVE": cumulative}
        return Launch(rows_kernel, self._row_grid, numbers, 8, **flags, **updates, **sizes)

    def _output(self) -> Launch:
        block, numbers = self.block, (*self._mean_numbers, *self.outputs)
        flags = {**self._mean_flags, **self._block_flags, "HANDS_ON": block.hands_on}
        flags["FIRST"] = block.norm != BATCH_NORM
        return self._block_pass(block_kernel, OUTPUT, numbers, **flags)

    def _sums(self, handed: bool, two: bool) -> Launch:
        return self._block_pass(sums_kernel, SUMS, self.outputs, **self._block_flags, HANDED=handed, TWO=two)

    def _row_gradients(self) -> Launch:
        block, numbers = self.block, (self.sum_programs, self.window.filters, self.positions)
        flags = {"NORM": block.norm, "AFFINE": block.affine, "BIAS": block.bias, "PRELU": block.slopes}
        sizes = {"PROGRAMS": power_of_two(self.sum_programs), "WIDTH": ROW_WIDTH}
        return Launch(rows_gradient_kernel, self._row_grid, numbers, 8, **flags, **sizes)

    def _block_back(self, handed: bool, direct: bool) -> Launch:
        flags = {**self._block_flags, "HANDED": handed, "DIRECT": direct}
        flags |= {"NORM": self.block.norm, "SUMMED": self.plan.summed}
        return self._block_pass(block_back_kernel, BLOCK_BACK, self.outputs, **flags)
