"""Elementwise kernels: from inner products to outputs, and back.

Norms and their gradients are [group, position] in float32; constants are [constant, channel].
"""

from dcnet.device_functions import Block, at_least, at_most, constexpr, device_function, reciprocal, tl
from dcnet.kernels.device_helpers import channel_constants, chunk_of, keep_means, mean_norm, split, tile


@device_function
def load_product(product: Block, inside: Block) -> Block:
    """Inner products in float32; those beyond the range of float16 are clamped to it."""
    z = tl.load(product, mask=inside, other=0.0).to(tl.float32)
    if product.dtype.element_ty == tl.float16:
        z = at_most(at_least(z, -65504.0), 65504.0)
    return z


@device_function
def inverse_norm(n: Block, product: Block) -> Block:
    """1 / n; NaN where n is infinite but the inner products, in float16, are clamped."""
    inverse = 1 / n
    if product.dtype.element_ty == tl.float16:
        inverse = tl.where(n < float("inf"), inverse, float("nan"))
    return inverse


@device_function
def apply_kernel(
    product: Block,
    norm: Block,
    table: Block,
    bias: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    output: Block,
    kept: Block,
    count: Block,
    of: Block,
    decay: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    total: Block,
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
    ONE: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """y = a h(b n) g(z / n) + bias."""
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    constants = channel_constants(table, mean, channels, total, KNOWN, RELATIVE, CHUNKS, WIDTH)
    blocks = tl.cdiv(pixels, BLOCK)
    positions = images * pixels
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(
            t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK
        )
        n = tl.load(norm + tl.program_id(1) * positions + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            z = load_product(product + start + elements, inside)
            if WEIGHTED:
                h = outer[0] * MAGNITUDE(outer[1] * n, *own, FAST)[0]
            else:
                h = MAGNITUDE(n, *own, FAST)[0]
            y = h * ANGLE(z * inverse, *angular, FAST)[0]
            if BIAS:
                column = chunk * WIDTH + tl.arange(0, WIDTH)
                offset = tl.load(bias + tl.program_id(1) * channels + column, mask=column < channels, other=0.0)
                y = y + offset.to(tl.float32)[None, :]
            tl.store(output + start + elements, y.to(output.dtype.element_ty), mask=inside)


@device_function
def back_kernel(
    gradient: Block,
    saved: Block,
    norm: Block,
    table: Block,
    kept: Block,
    product_gradient: Block,
    norm_gradient: Block,
    sums: Block,
    mean_sums: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    total: Block,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    FROM_OUTPUT: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    SUMMED: constexpr,
    WEIGHTED: constexpr,
    BIAS: constexpr,
    MEAN: constexpr,
    ONE: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """Computes from dy: dz, dn / n of every position, and sums over positions for everything that belongs to a channel.

    `saved` is z, or y where the angle can be computed from it. The sums are those of the learned constants in their
    order, of a and b with a weighting, and of the bias; one row per program, so that results are deterministic.
    """
    mean = 1.0
    if MEAN > 0:
        mean = tl.load(kept)
    constants = channel_constants(table, mean, channels, total, KNOWN, RELATIVE, CHUNKS, WIDTH)
    blocks = tl.cdiv(pixels, BLOCK)
    positions = images * pixels
    ROWS: constexpr = len(SUMMED) + 2 * WEIGHTED + BIAS
    totals: Block = ()
    for _ in tl.static_range(CHUNKS * ROWS):
        totals = totals + (tl.zeros([BLOCK, WIDTH], tl.float32),)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(
            t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK
        )
        place = tl.program_id(1) * positions + position
        n = tl.load(norm + place, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, saved)
        at_position = tl.zeros([BLOCK], tl.float32)
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            d = tl.load(gradient + start + elements, mask=inside, other=0.0).to(tl.float32)
            v = load_product(saved + start + elements, inside)
            h, g, size, g_value, cosine = parts(
                v, n, inverse, own, angular, outer, MAGNITUDE, ANGLE, FROM_OUTPUT, WEIGHTED, FAST
            )
            by_cosine = d * size * g[1]
            dz = (by_cosine * inverse).to(product_gradient.dtype.element_ty)
            tl.store(product_gradient + start + elements, dz, mask=inside)
            by_h = d * g_value
            by_argument = by_h * h[1]
            if WEIGHTED:
                by_h = by_h * outer[0]
                by_argument = by_argument * (outer[0] * outer[1])
            at_position += tl.sum(by_argument - by_cosine * cosine * inverse, 1)
            for i in tl.static_range(len(SUMMED)):
                if SUMMED[i] < COUNTS[0]:
                    term = by_h * h[2 + SUMMED[i]]
                else:
                    term = d * size * g[2 + SUMMED[i] - COUNTS[0]]
                added = added + (totals[chunk * ROWS + i] + term,)
            if WEIGHTED:
                added = added + (totals[chunk * ROWS + len(SUMMED)] + d * h[0] * g_value,)
                added = added + (totals[chunk * ROWS + len(SUMMED) + 1] + by_h * h[1] * n,)
            if BIAS:
                added = added + (totals[chunk * ROWS + ROWS - 1] + d,)
        tl.store(norm_gradient + place[:, None], at_position[:, None] * inverse, mask=there[:, None])
        totals = added
    store_sums(totals, table, sums, mean_sums, channels, total, SUMMED, RELATIVE, ROWS, MEAN, CHUNKS, WIDTH)


@device_function
def parts(
    v: Block,
    n: Block,
    inverse: Block,
    own: Block,
    angular: Block,
    outer: Block,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    FROM_OUTPUT: constexpr,
    WEIGHTED: constexpr,
    FAST: constexpr,
) -> Block:
    """h and g with their derivatives, a h, the value of g, and the cosine, from z or from y = a h g."""
    if WEIGHTED:
        h = MAGNITUDE(outer[1] * n, *own, FAST)
        size = outer[0] * h[0]
    else:
        h = MAGNITUDE(n, *own, FAST)
        size = h[0]
    if FROM_OUTPUT:
        # The magnitude is positive here, but may be too small as a divisor.
        g_value = v * reciprocal(tl.maximum(size, 1e-30), FAST)
        g = ANGLE(g_value, *angular, FAST)
        cosine = g[0]
    else:
        cosine = v * inverse
        g = ANGLE(cosine, *angular, FAST)
        g_value = g[0]
    return h, g, size, g_value, cosine


@device_function
def store_sums(
    totals: Block,
    table: Block,
    sums: Block,
    mean_sums: Block,
    channels: Block,
    total: Block,
    SUMMED: constexpr,
    RELATIVE: constexpr,
    ROWS: constexpr,
    MEAN: constexpr,
    CHUNKS: constexpr,
    WIDTH: constexpr,
) -> None:
    """Writes the sums of this program, and its part of the gradient of the batch mean norm."""
    by_mean = tl.zeros([WIDTH], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        inside = column < channels
        channel = tl.program_id(1) * channels + column
        for i in tl.static_range(ROWS):
            row = tl.sum(totals[chunk * ROWS + i], 0)
            tl.store(sums + (tl.program_id(0) * ROWS + i) * total + channel, row, mask=inside)
            if i < len(SUMMED):
                if RELATIVE[SUMMED[i]]:
                    by_mean += row * tl.load(table + SUMMED[i] * total + channel, mask=inside, other=0.0)
    if MEAN == 1:
        tl.store(mean_sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(by_mean))


@device_function
def add_kernel(
    input_gradient: Block,
    input: Block,
    factor: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    ONE: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
) -> None:
    """dx += factor x, with one factor per position: the part of the gradient that comes from the norm."""
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(
            t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK
        )
        by_norm = tl.load(factor + tl.program_id(1) * images * pixels + position, mask=there, other=0.0)[:, None]
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            x = tl.load(input + start + elements, mask=inside, other=0.0).to(tl.float32)
            dx = tl.load(input_gradient + start + elements, mask=inside, other=0.0).to(tl.float32)
            dx = (dx + by_norm * x).to(input_gradient.dtype.element_ty)
            tl.store(input_gradient + start + elements, dx, mask=inside)
