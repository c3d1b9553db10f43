"""Backward kernels of a fused block: sums of the gradient of the normalization, and the gradient of the inner products.

The rows of a block and the codes NORM and ACTIVATION are those of the forward kernels, see `block_kernels`.
"""

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.activations import activated, through_activation
from dcnet.kernels.block_kernels import channel_rows, normalized, program_sums, slope_of
from dcnet.kernels.device_helpers import channel_constants, chunk_of, split, tile
from dcnet.kernels.pointwise_kernels import (
    gradients,
    inverse_norm,
    load_product,
    load_tile,
    magnitude_times_angle,
    parts,
    store_sums,
    store_tile,
)


@device_function
def block_gradient(
    d: Block,
    v: Block,
    by_square: Block,
    rows: Block,
    CHUNK: constexpr,
    ACTIVATION: constexpr,
    HANDED: constexpr,
) -> Block:
    """The gradients of the activation's output and input, from that of the output without its sum of squares."""
    slope = slope_of(rows, CHUNK, ACTIVATION)
    if HANDED:
        d = d + by_square * activated(v, slope, ACTIVATION)
    return d, through_activation(d, v, slope, ACTIVATION)


@device_function
def sums_kernel(
    gradient: Block,
    second: Block,
    squares_gradient: Block,
    product: Block,
    norm: Block,
    table: Block,
    kept: Block,
    rows: Block,
    output: Block,
    inner_gradient: Block,
    partial: Block,
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
    AFFINE: constexpr,
    ACTIVATION: constexpr,
    RESIDUAL: constexpr,
    HANDED: constexpr,
    TWO: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """Sums over positions that the gradient of the normalization needs, per program: of dv, dv (y - mean), and dslope.

    With a residual, v is not computed again: the output has its sign. dv is also the gradient of the residual and is
    stored. TWO: the gradient of the output is the sum of two tensors, as its users returned them; dv is stored, too.
    """
    mean = 1.0
    if MEAN > 0:
        mean = tl.load(kept)
    constants = channel_constants(table, mean, channels, channels, KNOWN, RELATIVE, CHUNKS, WIDTH)
    COUNT: constexpr = 4 * AFFINE
    known = channel_rows(rows, channels, COUNT, CHUNKS, WIDTH)
    ROWS: constexpr = 3 if ACTIVATION == 2 else 2
    totals: Block = ()
    for _ in tl.static_range(CHUNKS * ROWS):
        totals = totals + (tl.zeros([BLOCK, WIDTH], tl.float32),)
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, 0, ONE, BLOCK)
        n = tl.load(norm + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        by_square = n
        if HANDED:
            by_square = 2 * tl.load(squares_gradient + position, mask=there, other=0.0)[:, None]
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            d = load_tile(gradient + start + elements, inside, FULL)
            if TWO:
                d += load_tile(second + start + elements, inside, FULL)
            z = load_product(product + start + elements, inside, FULL)
            y = magnitude_times_angle(z, n, inverse, constants, chunk, MAGNITUDE, ANGLE, COUNTS, WEIGHTED, FAST)
            v = normalized(y, known, chunk, AFFINE)
            if RESIDUAL:
                v = load_tile(output + start + elements, inside, FULL)
            d, inner = block_gradient(d, v, by_square, known, chunk, ACTIVATION, HANDED)
            if RESIDUAL or TWO:
                rounded = inner.to(inner_gradient.dtype.element_ty)
                store_tile(inner_gradient + start + elements, rounded, inside, FULL)
                inner = rounded.to(tl.float32)
            u = y
            if AFFINE:
                u = y - known[4 * chunk + 3]
            added = added + (totals[ROWS * chunk] + inner, totals[ROWS * chunk + 1] + inner * u)
            if ACTIVATION == 2:
                added = added + (totals[ROWS * chunk + 2] + tl.where(v > 0, 0.0, d * v),)
        totals = added
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        for i in tl.static_range(ROWS):
            row = partial + (ROWS * tl.program_id(0) + i) * channels + column
            tl.store(row, tl.sum(totals[ROWS * chunk + i], 0), mask=column < channels)


@device_function
def rows_gradient_kernel(
    partial: Block,
    rows: Block,
    gamma_gradient: Block,
    beta_gradient: Block,
    bias_gradient: Block,
    prelu_gradient: Block,
    coefficients: Block,
    programs: Block,
    channels: Block,
    count: Block,
    NORM: constexpr,
    AFFINE: constexpr,
    BIAS: constexpr,
    PRELU: constexpr,
    PROGRAMS: constexpr,
    WIDTH: constexpr,
) -> None:
    """Gradients of the parameters of the block, and the coefficients in dy = scale dv - first - second v.

    The gradient of the normalization, dy = scale (dv - mean of dv - yhat mean of dv yhat), has this form.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    ROWS: constexpr = 3 if PRELU > 0 else 2
    scale = tl.load(rows + channel, mask=inside, other=0.0)
    inverse = tl.load(rows + 4 * channels + channel, mask=inside, other=0.0)
    total = program_sums(partial, channel, inside, programs, channels, 0, ROWS, PROGRAMS)
    product = program_sums(partial, channel, inside, programs, channels, 1, ROWS, PROGRAMS)
    if NORM == 1:
        second = inverse * inverse * product / count
        shift = tl.load(rows + 5 * channels + channel, mask=inside, other=0.0)
        tl.store(coefficients + channel, scale * total / count - second * shift, mask=inside)
        tl.store(coefficients + channels + channel, second, mask=inside)
    if AFFINE:
        by_gamma = (inverse * product).to(gamma_gradient.dtype.element_ty)
        tl.store(gamma_gradient + channel, by_gamma, mask=inside)
        tl.store(beta_gradient + channel, total.to(beta_gradient.dtype.element_ty), mask=inside)
    if BIAS:
        by_bias = tl.zeros([WIDTH], tl.float32)
        if NORM != 1:
            by_bias = scale * total
        tl.store(bias_gradient + channel, by_bias.to(bias_gradient.dtype.element_ty), mask=inside)
    if PRELU > 0:
        by_slope = program_sums(partial, channel, inside, programs, channels, 2, ROWS, PROGRAMS)
        tl.store(prelu_gradient + channel, by_slope.to(prelu_gradient.dtype.element_ty), mask=inside)


@device_function
def block_back_kernel(
    gradient: Block,
    squares_gradient: Block,
    product: Block,
    norm: Block,
    table: Block,
    kept: Block,
    rows: Block,
    coefficients: Block,
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
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    SUMMED: constexpr,
    WEIGHTED: constexpr,
    MEAN: constexpr,
    NORM: constexpr,
    AFFINE: constexpr,
    ACTIVATION: constexpr,
    DIRECT: constexpr,
    HANDED: constexpr,
    ONE: constexpr,
    FULL: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    STAGES: constexpr,
    FAST: constexpr,
) -> None:
    """From the gradient of the output: dz, dn / n of every position, and sums over positions per channel constant.

    DIRECT: `gradient` is dv already.
    """
    mean = 1.0
    if MEAN > 0:
        mean = tl.load(kept)
    constants = channel_constants(table, mean, channels, channels, KNOWN, RELATIVE, CHUNKS, WIDTH)
    COUNT: constexpr = 4 * AFFINE
    known = channel_rows(rows, channels, COUNT, CHUNKS, WIDTH)
    BATCH: constexpr = 2 if NORM == 1 else 0
    means = channel_rows(coefficients, channels, BATCH, CHUNKS, WIDTH)
    ROWS: constexpr = len(SUMMED) + 2 * WEIGHTED
    totals: Block = ()
    for _ in tl.static_range(CHUNKS * ROWS):
        totals = totals + (tl.zeros([BLOCK, WIDTH], tl.float32),)
    blocks = tl.cdiv(pixels, BLOCK)
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(t, blocks, pixels, image_stride, pixel_stride, 0, ONE, BLOCK)
        n = tl.load(norm + position, mask=there, other=1.0)[:, None]
        inverse = inverse_norm(n, product)
        by_square = n
        if HANDED and not DIRECT:
            by_square = 2 * tl.load(squares_gradient + position, mask=there, other=0.0)[:, None]
        at_position = tl.zeros([BLOCK, WIDTH], tl.float32)
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            d = load_tile(gradient + start + elements, inside, FULL)
            z = load_product(product + start + elements, inside, FULL)
            found = parts(z, n, inverse, own, angular, outer, MAGNITUDE, ANGLE, False, WEIGHTED, FAST)
            v = normalized(found[2] * found[3], known, chunk, AFFINE)
            if not DIRECT:
                d = block_gradient(d, v, by_square, known, chunk, ACTIVATION, HANDED)[1]
            if AFFINE:
                d = known[4 * chunk] * d
            if NORM == 1:
                d = d - means[2 * chunk] - means[2 * chunk + 1] * v
                if not FULL:
                    d = tl.where(there[:, None], d, 0.0)
            dz, by_norm, terms = gradients(d, n, inverse, found, outer, SUMMED, COUNTS, WEIGHTED)
            store_tile(product_gradient + start + elements, dz, inside, FULL)
            at_position += by_norm
            for i in tl.static_range(ROWS):
                added = added + (totals[chunk * ROWS + i] + terms[i],)
        whole = tl.sum(at_position, 1)[:, None] * inverse
        tl.store(norm_gradient + position[:, None], whole, mask=there[:, None])
        totals = added
    store_sums(totals, table, sums, mean_sums, channels, channels, SUMMED, RELATIVE, ROWS, MEAN, CHUNKS, WIDTH)
