"""Kernels that sum over channels and windows: patch norms, and their gradients with respect to pixels."""

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.device_helpers import chunk_of, root, tile
from dcnet.kernels.filter_kernels import normalize_filter


@device_function
def prepare_kernel(
    input: Block,
    squares: Block,
    weight: Block,
    unit: Block,
    table: Block,
    stored: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    tiles: Block,
    filters: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    eps: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
    KINDS: constexpr,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    SCALE: constexpr,
    WEIGHTING: constexpr,
    ONE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    FAST: constexpr,
) -> None:
    """Sums x^2 over channels for every pixel; further programs of the same launch normalize a filter each."""
    pid = tl.program_id(0)
    if pid < tiles:
        sum_squares(
            pid, input, squares, images, pixels, image_stride, pixel_stride, channel_stride, channels, ONE,
            BLOCK, WIDTH,
        )  # fmt: skip
    elif (pid - tiles < filters) & (tl.program_id(1) == 0):
        normalize_filter(
            pid - tiles, weight, unit, table, stored, filters, size, row_stride, channel_step, height_step, width_step,
            eps, CHANNELS, KERNEL, LAST, KINDS, MAGNITUDE, COUNTS, SCALE, WEIGHTING, FAST,
        )  # fmt: skip


@device_function
def prepare_rows_kernel(
    input: Block,
    norm: Block,
    sums: Block,
    weight: Block,
    unit: Block,
    table: Block,
    stored: Block,
    rows: Block,
    channels: Block,
    programs: Block,
    filters: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    eps: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
    KINDS: constexpr,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    SCALE: constexpr,
    WEIGHTING: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    FAST: constexpr,
) -> None:
    """The norms of rows, with one partial sum of them per program; further programs normalize a filter each."""
    pid = tl.program_id(0)
    if pid < programs:
        total = tl.zeros([BLOCK], tl.float32)
        for first in tl.range(pid * BLOCK, rows, programs * BLOCK):
            row = first + tl.arange(0, BLOCK)
            there = row < rows
            squares = tl.zeros([BLOCK, WIDTH], tl.float32)
            for start in range(0, channels, WIDTH):
                column = start + tl.arange(0, WIDTH)
                place = row.to(tl.int64)[:, None] * channels + column[None, :]
                inside = there[:, None] & (column < channels)[None, :]
                x = tl.load(input + place, mask=inside, other=0.0).to(tl.float32)
                squares += x * x
            n = root(tl.sum(squares, 1) + eps)
            tl.store(norm + row, n, mask=there)
            total += tl.where(there, n, 0.0)
        tl.store(sums + pid, tl.sum(total))
    else:
        normalize_filter(
            pid - programs, weight, unit, table, stored, filters, size, row_stride, channel_step, height_step,
            width_step, eps, CHANNELS, KERNEL, LAST, KINDS, MAGNITUDE, COUNTS, SCALE, WEIGHTING, FAST,
        )  # fmt: skip


@device_function
def squares_kernel(
    input: Block,
    squares: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    ONE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> None:
    """Sums x^2 over channels for every pixel; the filters are prepared already."""
    sum_squares(
        tl.program_id(0), input, squares, images, pixels, image_stride, pixel_stride, channel_stride, channels, ONE,
        BLOCK, WIDTH,
    )  # fmt: skip


@device_function
def sum_squares(
    t: Block,
    input: Block,
    squares: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    ONE: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> None:
    blocks = tl.cdiv(pixels, BLOCK)
    position, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK)
    elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, 0, BLOCK, WIDTH)
    x = tl.load(input + start + elements, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(x * x, 1)
    for first in range(WIDTH, channels, WIDTH):
        inside = there[:, None] & (first + tl.arange(0, WIDTH) < channels)[None, :]
        x = tl.load(input + start + first * channel_stride + elements, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
    tl.store(squares + tl.program_id(1) * images * pixels + position, total, mask=there)


@device_function
def norm_kernel(
    squares: Block,
    norm: Block,
    sums: Block,
    patches: Block,
    pixels: Block,
    outs: Block,
    height: Block,
    width: Block,
    out_width: Block,
    eps: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    BLOCK: constexpr,
) -> None:
    """||x|| = sqrt(sum over the window + eps) of every patch, and one partial sum of the norms per program."""
    HIGH: constexpr = KERNEL[0]
    WIDE: constexpr = KERNEL[1]
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * BLOCK, patches, tl.num_programs(0) * BLOCK):
        patch = first + tl.arange(0, BLOCK)
        there = patch < patches
        image, place = patch // outs, patch % outs
        top = (place // out_width) * STRIDE[0] - PADDING[0]
        left = (place % out_width) * STRIDE[1] - PADDING[1]
        window = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(HIGH):
            for j in tl.static_range(WIDE):
                row, column = top + i * DILATION[0], left + j * DILATION[1]
                inside = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
                window += tl.load(squares + image * pixels + row * width + column, mask=inside, other=0.0)
        n = root(window + eps)
        tl.store(norm + patch, n, mask=there)
        total += tl.where(there, n, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@device_function
def spread_kernel(
    norm: Block,
    norm_gradient: Block,
    mean_sums: Block,
    factor: Block,
    count: Block,
    of: Block,
    places: Block,
    pixels: Block,
    outs: Block,
    out_height: Block,
    width: Block,
    out_width: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    MEAN: constexpr,
    SUMS: constexpr,
    SCALE: constexpr,
    SLICES: constexpr,
    BLOCK: constexpr,
) -> None:
    """SCALE times the factor of x in its gradient: the sum of (dn + d mean / count) / n over all patches of the pixel.

    With a scale of 1/2, this is the gradient of the sum of squares.
    """
    HIGH: constexpr = KERNEL[0]
    WIDE: constexpr = KERNEL[1]
    by_mean = 0.0
    if MEAN == 1:
        part = tl.arange(0, SUMS)
        by_mean = tl.sum(tl.load(mean_sums + part, mask=part < count, other=0.0)) / of
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < places
    image, pixel = place // pixels, place % pixels
    row, column = pixel // width + PADDING[0], pixel % width + PADDING[1]
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(HIGH):
        for j in tl.static_range(WIDE):
            down, right = row - i * DILATION[0], column - j * DILATION[1]
            out_row, out_column = down // STRIDE[0], right // STRIDE[1]
            inside = there & (down >= 0) & (right >= 0) & (out_row < out_height) & (out_column < out_width)
            inside = inside & (down % STRIDE[0] == 0) & (right % STRIDE[1] == 0)
            patch = image * outs + out_row * out_width + out_column
            for part in tl.static_range(SLICES):
                total += tl.load(norm_gradient + part * of + patch, mask=inside, other=0.0)
            if MEAN == 1:
                total += tl.where(inside, by_mean / tl.load(norm + patch, mask=inside, other=1.0), 0.0)
    tl.store(factor + place, SCALE * total, mask=there)
