"""Forward kernels of a fused block: statistics, and output with normalization, residual and activation.

The output of the convolution, y = a h(b n) g(z / n), is never stored: every pass computes it again from z. The rows of
a block have one number per channel: scale and offset in v = scale y + offset, the slope of PReLU, and the mean of y.
"""

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.activations import activated
from dcnet.kernels.device_helpers import channel_constants, chunk_of, keep_means, mean_norm, tile
from dcnet.kernels.pointwise_kernels import inverse_norm, load_product, load_tile, magnitude_times_angle, store_tile

# NORM is 0 without normalization, 1 with statistics of the batch, 2 with running statistics. ACTIVATION is a code of
# `activations`.


@device_function
def channel_rows(rows: Block, channels: Block, COUNT: constexpr, CHUNKS: constexpr, WIDTH: constexpr) -> Block:
    """The first rows of a block, chunk by chunk, each [1, channels]."""
    values: Block = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        for i in tl.static_range(COUNT):
            row = tl.load(rows + i * channels + column, mask=column < channels, other=0.0)
            values = values + (row[None, :],)
    return values


@device_function
def normalized(y: Block, rows: Block, CHUNK: constexpr, AFFINE: constexpr) -> Block:
    """v = scale y + offset."""
    if AFFINE:
        v = rows[4 * CHUNK] * y + rows[4 * CHUNK + 1]
    else:
        v = y
    return v


@device_function
def slope_of(rows: Block, CHUNK: constexpr, ACTIVATION: constexpr) -> Block:
    """The slope of PReLU; not used by other activations."""
    slope = 0.0
    if ACTIVATION == 2:
        slope = rows[4 * CHUNK + 2]
    return slope


@device_function
def statistics_kernel(
    product: Block,
    norm: Block,
    table: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    kept: Block,
    batches: Block,
    partial: Block,
    count: Block,
    of: Block,
    decay: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    WEIGHTED: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    COUNTS_BATCH: constexpr,
    SUMS: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """Sums of y - p and (y - p)^2 over positions, one row each per program; the last row is the pivot p.

    p is y at the first position of every channel. Without it, the variance of a channel would lose its digits if its
    mean is much larger. COUNTS_BATCH: also counts the batch for the running statistics.
    """
    if COUNTS_BATCH and tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    constants = channel_constants(table, mean, channels, channels, KNOWN, RELATIVE, CHUNKS, WIDTH)
    first = tl.load(norm)
    totals: Block = ()
    pivots: Block = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        at_first = load_product(product + column * channel_stride, column < channels, FULL)[None, :]
        pivot = magnitude_times_angle(
            at_first, first, inverse_norm(first, product), constants, chunk, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST
        )
        pivots = pivots + (pivot + tl.zeros([1, WIDTH], tl.float32),)
        totals = totals + (tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32))
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, 0, ONE, BLOCK)
        n = tl.load(norm + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            z = load_product(product + start + elements, inside, FULL)
            y = magnitude_times_angle(z, n, inverse, constants, chunk, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST)
            apart = y - pivots[chunk]
            if not FULL:
                apart = tl.where(there[:, None], apart, 0.0)
            added = added + (totals[2 * chunk] + apart, totals[2 * chunk + 1] + apart * apart)
        totals = added
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        row = partial + 2 * tl.program_id(0) * channels + column
        tl.store(row, tl.sum(totals[2 * chunk], 0), mask=column < channels)
        tl.store(row + channels, tl.sum(totals[2 * chunk + 1], 0), mask=column < channels)
        if tl.program_id(0) == 0:
            last = partial + 2 * tl.num_programs(0) * channels + column
            tl.store(last, tl.sum(pivots[chunk], 0), mask=column < channels)


@device_function
def program_sums(
    partial: Block,
    channel: Block,
    inside: Block,
    programs: Block,
    channels: Block,
    ROW: constexpr,
    ROWS: constexpr,
    PROGRAMS: constexpr,
) -> Block:
    """One sum of each channel over all programs, in a fixed order."""
    program = tl.arange(0, PROGRAMS)
    places = (program[:, None] * ROWS + ROW) * channels + channel[None, :]
    return tl.sum(tl.load(partial + places, mask=(program < programs)[:, None] & inside[None, :], other=0.0), 0)


@device_function
def rows_kernel(
    partial: Block,
    gamma: Block,
    beta: Block,
    bias: Block,
    prelu: Block,
    running_mean: Block,
    running_var: Block,
    batches: Block,
    rows: Block,
    updated: Block,
    programs: Block,
    channels: Block,
    count: Block,
    eps: Block,
    momentum: Block,
    NORM: constexpr,
    AFFINE: constexpr,
    BIAS: constexpr,
    PRELU: constexpr,
    UPDATE: constexpr,
    CUMULATIVE: constexpr,
    PROGRAMS: constexpr,
    WIDTH: constexpr,
) -> None:
    """The rows of a block from the statistics of its batch, or from running ones; updates the running statistics.

    A bias of the convolution is part of the shift. Statistics of the batch contain it, so there it cancels.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    mean = tl.zeros([WIDTH], tl.float32)
    shift = tl.zeros([WIDTH], tl.float32)
    scale = tl.full([WIDTH], 1.0, tl.float32)
    inverse = tl.full([WIDTH], 1.0, tl.float32)
    if BIAS:
        shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if NORM == 1:
        pivot = tl.load(partial + 2 * programs * channels + channel, mask=inside, other=0.0)
        apart = program_sums(partial, channel, inside, programs, channels, 0, 2, PROGRAMS) / count
        square = program_sums(partial, channel, inside, programs, channels, 1, 2, PROGRAMS) / count
        mean = pivot + apart
        variance = tl.maximum(square - apart * apart, 0.0, propagate_nan=tl.PropagateNan.ALL)
        inverse = 1 / tl.sqrt(variance + eps)
        if UPDATE > 0:
            share = momentum
            if CUMULATIVE:
                share = 1.0 / tl.load(batches).to(tl.float32)
            before = tl.load(running_mean + channel, mask=inside, other=0.0).to(tl.float32)
            spread = tl.load(running_var + channel, mask=inside, other=0.0).to(tl.float32)
            before = before + share * (mean + shift - before)
            spread = spread + share * (variance * (count / (count - 1)) - spread)
            if UPDATE == 1:
                tl.store(updated + channel, before, mask=inside)
                tl.store(updated + channels + channel, spread, mask=inside)
            else:
                tl.store(running_mean + channel, before.to(running_mean.dtype.element_ty), mask=inside)
                tl.store(running_var + channel, spread.to(running_var.dtype.element_ty), mask=inside)
        shift = tl.zeros([WIDTH], tl.float32)
    if NORM == 2:
        mean = tl.load(running_mean + channel, mask=inside, other=0.0).to(tl.float32) - shift
        variance = tl.load(running_var + channel, mask=inside, other=1.0).to(tl.float32)
        inverse = 1 / tl.sqrt(variance + eps)
        shift = tl.zeros([WIDTH], tl.float32)
    scale = inverse
    if AFFINE:
        scale = inverse * tl.load(gamma + channel, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(beta + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + channel, scale, mask=inside)
    tl.store(rows + channels + channel, shift - scale * mean, mask=inside)
    if PRELU > 0:
        slope = tl.load(prelu + channel * (PRELU - 1), mask=inside, other=0.0).to(tl.float32)
        tl.store(rows + 2 * channels + channel, slope, mask=inside)
    tl.store(rows + 3 * channels + channel, mean, mask=inside)
    tl.store(rows + 4 * channels + channel, inverse, mask=inside)
    tl.store(rows + 5 * channels + channel, shift, mask=inside)


@device_function
def block_kernel(
    product: Block,
    norm: Block,
    table: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    kept: Block,
    rows: Block,
    residual: Block,
    output: Block,
    squares: Block,
    count: Block,
    of: Block,
    decay: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    WEIGHTED: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    SUMS: constexpr,
    FIRST: constexpr,
    AFFINE: constexpr,
    ACTIVATION: constexpr,
    RESIDUAL: constexpr,
    HANDS_ON: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """The output of the block, and its sum of squares over channels, which the next block needs for its norms.

    FIRST: no pass over the product was before this one, so that it has to form the mean norm.
    """
    if FIRST:
        mean = mean_norm(sums, running, count, of, MEAN, SUMS)
        if (MEAN > 0) & (tl.program_id(0) == 0):
            keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    else:
        mean = 1.0
        if MEAN > 0:
            mean = tl.load(kept)
    constants = channel_constants(table, mean, channels, channels, KNOWN, RELATIVE, CHUNKS, WIDTH)
    ROWS: constexpr = 4 * AFFINE
    known = channel_rows(rows, channels, ROWS, CHUNKS, WIDTH)
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, 0, ONE, BLOCK)
        n = tl.load(norm + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        square = tl.zeros([BLOCK, WIDTH], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            z = load_product(product + start + elements, inside, FULL)
            y = magnitude_times_angle(z, n, inverse, constants, chunk, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST)
            v = normalized(y, known, chunk, AFFINE)
            if RESIDUAL:
                v = v + load_tile(residual + start + elements, inside, FULL)
            slope = slope_of(known, chunk, ACTIVATION)
            x = activated(v, slope, ACTIVATION).to(output.dtype.element_ty)
            store_tile(output + start + elements, x, inside, FULL)
            square += x.to(tl.float32) * x.to(tl.float32)
        if HANDS_ON:
            tl.store(squares + position, tl.sum(square, 1), mask=there)
