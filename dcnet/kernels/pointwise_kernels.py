"""Elementwise kernels: from inner products to outputs, and back.

Norms are [group, position] in float32; constants are [constant, channel]. The second dimension of a grid is the group,
or a slice of the channels of a single wide group; all slices have the same norms.
"""

from dcnet.device_functions import Block, at_least, at_most, constexpr, device_function, reciprocal, tl
from dcnet.kernels.device_helpers import channel_constants, chunk_of, keep_means, mean_norm, split, tile


@device_function
def load_tile(pointer: Block, inside: Block, FULL: constexpr) -> Block:
    """The elements of a tile in float32; if all tiles are FULL, no element needs a mask."""
    if FULL:
        found = tl.load(pointer)
    else:
        found = tl.load(pointer, mask=inside, other=0.0)
    return found.to(tl.float32)


@device_function
def load_product(pointer: Block, inside: Block, FULL: constexpr) -> Block:
    """Inner products in float32; those beyond the range of float16 are clamped to it."""
    z = load_tile(pointer, inside, FULL)
    if pointer.dtype.element_ty == tl.float16:
        z = at_most(at_least(z, -65504.0), 65504.0)
    return z


@device_function
def store_tile(pointer: Block, value: Block, inside: Block, FULL: constexpr) -> None:
    """Stores a tile in the dtype of its tensor."""
    if FULL:
        tl.store(pointer, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@device_function
def inverse_norm(n: Block, product: Block) -> Block:
    """1 / n; NaN where n is infinite but the inner products, in float16, are clamped."""
    inverse = 1 / n
    if product.dtype.element_ty == tl.float16:
        inverse = tl.where(n < float("inf"), inverse, float("nan"))
    return inverse


@device_function
def magnitude_times_angle(
    z: Block,
    n: Block,
    inverse: Block,
    constants: Block,
    CHUNK: constexpr,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    WEIGHTED: constexpr,
    FAST: constexpr,
) -> Block:
    """y = a h(b n) g(z / n)."""
    own, angular, outer = split(constants, CHUNK, COUNTS)
    if WEIGHTED:
        h = outer[0] * MAGNITUDE(outer[1] * n, *own, FAST)[0]
    else:
        h = MAGNITUDE(n, *own, FAST)[0]
    return h * ANGLE(z * inverse, *angular, FAST)[0]


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
    SLICES: constexpr,
    ONE: constexpr,
    FULL: constexpr,
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
        n = tl.load(norm + tl.program_id(1) // SLICES * positions + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            z = load_product(product + start + elements, inside, FULL)
            y = magnitude_times_angle(z, n, inverse, constants, chunk, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST)
            if BIAS:
                column = chunk * WIDTH + tl.arange(0, WIDTH)
                offset = tl.load(bias + tl.program_id(1) * channels + column, mask=column < channels, other=0.0)
                y = y + offset.to(tl.float32)[None, :]
            store_tile(output + start + elements, y, inside, FULL)


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
    SLICES: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """Computes from dy: dz, dn / n of every position, and sums over positions for everything that belongs to a channel.

    `saved` is z, or y where the angle can be computed from it. The sums are those of the learned constants in their
    order, of a and b with a weighting, and of the bias; one row per program, so that results are deterministic. Every
    slice writes its share of dn / n.
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
        n = tl.load(norm + tl.program_id(1) // SLICES * positions + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, saved)
        at_position = tl.zeros([BLOCK, WIDTH], tl.float32)
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            d = load_tile(gradient + start + elements, inside, FULL)
            v = load_product(saved + start + elements, inside, FULL)
            found = parts(v, n, inverse, own, angular, outer, MAGNITUDE, ANGLE, FROM_OUTPUT, WEIGHTED, FAST)
            dz, by_norm, terms = gradients(d, n, inverse, found, outer, SUMMED, COUNTS, WEIGHTED)
            store_tile(product_gradient + start + elements, dz, inside, FULL)
            at_position += by_norm
            for i in tl.static_range(len(SUMMED) + 2 * WEIGHTED):
                added = added + (totals[chunk * ROWS + i] + terms[i],)
            if BIAS:
                added = added + (totals[chunk * ROWS + ROWS - 1] + d,)
        whole = tl.sum(at_position, 1)[:, None] * inverse
        tl.store(norm_gradient + place[:, None], whole, mask=there[:, None])
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
def gradients(
    d: Block,
    n: Block,
    inverse: Block,
    found: Block,
    outer: Block,
    SUMMED: constexpr,
    COUNTS: constexpr,
    WEIGHTED: constexpr,
) -> Block:
    """From dy and `parts`: dz, the element's share of dn, and its terms of the sums over positions."""
    h, g, size, g_value, cosine = found
    dz = d * size * g[1] * inverse
    by_h = d * g_value
    by_argument = by_h * h[1]
    if WEIGHTED:
        by_h = by_h * outer[0]
        by_argument = by_argument * (outer[0] * outer[1])
    terms: Block = ()
    for i in tl.static_range(len(SUMMED)):
        if SUMMED[i] < COUNTS[0]:
            terms = terms + (by_h * h[2 + SUMMED[i]],)
        else:
            terms = terms + (d * size * g[2 + SUMMED[i] - COUNTS[0]],)
    if WEIGHTED:
        terms = terms + (d * h[0] * g_value, by_h * h[1] * n)
    return dz, by_argument - dz * cosine, terms


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
def add_rows_kernel(
    input_gradient: Block,
    input: Block,
    norm: Block,
    norm_gradient: Block,
    mean_sums: Block,
    count: Block,
    images: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    MEAN: constexpr,
    SUMS: constexpr,
    PARTS: constexpr,
    SLICES: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
) -> None:
    """dx += (dn + d mean / rows) / n x: what `spread_kernel` and `add_kernel` compute if every pixel is a patch.

    dn / n comes in PARTS parts, one for every slice of the output.
    """
    rows = images * pixels
    by_mean = 0.0
    if MEAN == 1:
        part = tl.arange(0, SUMS)
        by_mean = tl.sum(tl.load(mean_sums + part, mask=part < count, other=0.0)) / rows
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        row, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK)
        by_norm = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            by_norm += tl.load(norm_gradient + i * rows + row, mask=there, other=0.0)
        if MEAN == 1:
            by_norm += by_mean / tl.load(norm + row, mask=there, other=1.0)
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            x = load_tile(input + start + elements, inside, FULL)
            dx = load_tile(input_gradient + start + elements, inside, FULL)
            store_tile(input_gradient + start + elements, dx + by_norm[:, None] * x, inside, FULL)


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
    SLICES: constexpr,
    ONE: constexpr,
    FULL: constexpr,
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
        place = tl.program_id(1) // SLICES * images * pixels + position
        by_norm = tl.load(factor + place, mask=there, other=0.0)[:, None]
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            x = load_tile(input + start + elements, inside, FULL)
            dx = load_tile(input_gradient + start + elements, inside, FULL)
            store_tile(input_gradient + start + elements, dx + by_norm * x, inside, FULL)
