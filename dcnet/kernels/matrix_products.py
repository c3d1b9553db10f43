"""Matrix products of linear layers and 1x1 convolutions with a pass of the layer in their epilogue.

The forward product computes f(w, x) from its inner products while they are in registers. The product for the gradient
of the input adds the part of the norms. Each saves a pass over a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcnet.device_functions import INTERPRETED, Block, constexpr, device_function, tl
from dcnet.kernels.device_helpers import constants_of, keep_means, mean_norm
from dcnet.kernels.launch import Launch, aligned, power_of_two, raw_stream
from dcnet.kernels.passes import Passes
from dcnet.kernels.pointwise_kernels import inverse_norm, magnitude_times_angle
from dcnet.norms import HALF_PRECISIONS

# Rows, columns and depth of a tile, warps and stages: the fastest on an H200; see README.md.
OUTPUT = (128, 128, 64, 8, 4)
GRADIENT = (128, 128, 64, 8, 4)
# Fewer rows do not fill a GPU with tiles.
FEWEST_ROWS = 2048


@device_function
def tile_of(columns: Block, BLOCK_M: constexpr, BLOCK_N: constexpr) -> Block:
    """The first row and column of the program's tile; tiles of the same rows run at the same time."""
    across = columns // BLOCK_N
    return tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_N


@device_function
def multiply_tile(
    left: Block,
    right: Block,
    row: Block,
    column: Block,
    depth: Block,
    row_stride: Block,
    depth_stride: Block,
    column_stride: Block,
    WIDEN: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
) -> Block:
    """The product of rows of the left matrix and columns of the right one, whose strides are given, in float32."""
    k = tl.arange(0, BLOCK_K)
    lefts = left + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    rights = right + k[:, None] * depth_stride + column[None, :] * column_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        a, b = tl.load(lefts), tl.load(rights)
        if WIDEN:
            # Triton's interpreter cannot multiply bfloat16.
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        lefts += BLOCK_K
        rights += BLOCK_K * depth_stride
    return total


@device_function
def output_kernel(
    input: Block,
    unit: Block,
    norm: Block,
    table: Block,
    bias: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    output: Block,
    product: Block,
    kept: Block,
    rows: Block,
    filters: Block,
    features: Block,
    count: Block,
    of: Block,
    decay: Block,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    WEIGHTED: constexpr,
    BIAS: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    SUMS: constexpr,
    KEEP: constexpr,
    WIDEN: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """y = a h(b n) g(z / n) + bias with z = x w^T; with KEEP, z is stored, too."""
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    first, start = tile_of(filters, BLOCK_M, BLOCK_N)
    row, column = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    there = row < rows
    # Rows beyond the end read the last row, so that no load needs a mask.
    z = multiply_tile(
        input, unit, tl.minimum(row, rows - 1), column, features, features, 1, features, WIDEN, BLOCK_M, BLOCK_N,
        BLOCK_K, STAGES,
    )  # fmt: skip
    place = row.to(tl.int64)[:, None] * filters + column[None, :]
    if KEEP:
        tl.store(product + place, z.to(product.dtype.element_ty), mask=there[:, None])
    n = tl.load(norm + row, mask=there, other=1.0)[:, None]
    constants = constants_of(table, mean, column, column < filters, filters, KNOWN, RELATIVE)
    inverse = inverse_norm(n, output)
    y = magnitude_times_angle(z, n, inverse, constants, 0, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST)
    if BIAS:
        y = y + tl.load(bias + column).to(tl.float32)[None, :]
    tl.store(output + place, y.to(output.dtype.element_ty), mask=there[:, None])


@device_function
def input_gradient_kernel(
    product_gradient: Block,
    unit: Block,
    input: Block,
    factor: Block,
    gradient: Block,
    rows: Block,
    filters: Block,
    features: Block,
    WIDEN: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
) -> None:
    """dx = dz w^ + factor x, with one factor per row."""
    first, start = tile_of(features, BLOCK_M, BLOCK_N)
    row, column = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    there = row < rows
    total = multiply_tile(
        product_gradient, unit, tl.minimum(row, rows - 1), column, filters, filters, features, 1, WIDEN, BLOCK_M,
        BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    place = row.to(tl.int64)[:, None] * features + column[None, :]
    x = tl.load(input + place, mask=there[:, None], other=0.0).to(tl.float32)
    by_norm = tl.load(factor + row, mask=there, other=0.0)[:, None]
    tl.store(gradient + place, (total + by_norm * x).to(gradient.dtype.element_ty), mask=there[:, None])


class MatrixProducts:
    """The launches of both products of a layer."""

    def __init__(self, passes: Passes):
        self.passes, window = passes, passes.window
        self.rows, self.filters, self.features = passes.patches, window.filters, window.channels
        self.output = {keep: self._output(keep) for keep in (True, False)}
        self.gradient = self._gradient()

    @staticmethod
    def support(passes: Passes) -> tuple[bool, bool]:
        """Whether the kernels support the forward product, and the one for the gradient of the input."""
        window, half = passes.window, passes.settings.dtype in HALF_PRECISIONS
        if not (half and window.is_pointwise) or passes.patches < FEWEST_ROWS:
            return False, False
        return _divides(OUTPUT, window.filters, window.channels), _divides(GRADIENT, window.channels, window.filters)

    def _output(self, keep: bool) -> Launch:
        passes, plan, settings = self.passes, self.passes.plan, self.passes.settings
        numbers = (self.rows, self.filters, self.features, passes.norm_sums, passes.patches, plan.decay or 0.0)
        means = {"UPDATE": settings.update, "COUNTED": settings.counted, "SUMS": power_of_two(passes.norm_sums)}
        flags = {**passes.operator_flags, **means, "ANGLE": plan.angle, "KEEP": keep}
        return _launch(output_kernel, OUTPUT, self.rows, self.filters, numbers, **flags)

    def _gradient(self) -> Launch:
        numbers = (self.rows, self.filters, self.features)
        return _launch(input_gradient_kernel, GRADIENT, self.rows, self.features, numbers)

    def input_gradient(self, product_gradient: Tensor, x: Tensor, unit: Tensor, factor: Any) -> Tensor:
        """The gradient of the input; `factor` is that of x by the norms."""
        made, ok = torch.empty_like(x), aligned(product_gradient, x, unit)
        self.gradient(product_gradient, unit, x, factor, made, stream=raw_stream(x.device), aligned=ok)
        return made


def _divides(tiles: tuple[int, ...], columns: int, depth: int) -> bool:
    return columns % tiles[1] == 0 and depth % tiles[2] == 0


def _launch(kernel: Any, tiles: tuple[int, ...], rows: int, columns: int, numbers: Any, **flags: Any) -> Launch:
    high, wide, deep, warps, stages = tiles
    sizes = {"BLOCK_M": high, "BLOCK_N": wide, "BLOCK_K": deep, "STAGES": stages, "WIDEN": INTERPRETED}
    return Launch(kernel, (-(-rows // high) * (columns // wide),), numbers, warps, **flags, **sizes)
