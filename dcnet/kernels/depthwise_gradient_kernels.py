"""Backward kernels of depthwise convolutions: gradients of inner products and norms, of the input and of the filters.

Programs and tiles are as in `depthwise_kernels.py`.
"""

from dcnet.device_functions import Block, constexpr, device_function, reciprocal, tl
from dcnet.kernels.depthwise_kernels import load_filters, load_rows, place_of, products_and_norms, zero_tiles
from dcnet.kernels.device_helpers import constants_of, split
from dcnet.kernels.pointwise_kernels import gradients, parts


@device_function
def depthwise_back_kernel(
    gradient: Block,
    input: Block,
    unit: Block,
    table: Block,
    kept: Block,
    product_gradient: Block,
    norm_gradient: Block,
    inverse_norms: Block,
    sums: Block,
    mean_sums: Block,
    eps: Block,
    tiles: Block,
    row_blocks: Block,
    column_blocks: Block,
    height: Block,
    width: Block,
    out_height: Block,
    out_width: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    out_image_stride: Block,
    out_channel_stride: Block,
    channels: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    MAGNITUDE: constexpr,
    ANGLE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    SUMMED: constexpr,
    WEIGHTED: constexpr,
    BIAS: constexpr,
    MEAN: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    FAST: constexpr,
) -> None:
    """Computes from x and dy: dz, dn / n, 1 / n if the mean norm has a gradient, and sums over positions.

    The sums are as in `back_kernel`.
    """
    mean = 1.0
    if MEAN > 0:
        mean = tl.load(kept)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    constants = constants_of(table, mean, channel, there, channels, KNOWN, RELATIVE)
    own, angular, outer = split(constants, 0, COUNTS)
    COUNT: constexpr = len(SUMMED) + 2 * WEIGHTED + BIAS
    totals = zero_tiles(COUNT, BLOCK, WIDTH)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        image, first, column = place_of(t, row_blocks, column_blocks, ROWS, BLOCK)
        products, norms = products_and_norms(
            input + image * image_stride, unit, first, column, channel, there, height, width, pixel_stride,
            channel_stride, channels, eps, KERNEL, STRIDE, PADDING, DILATION, READ, True, ROWS, BLOCK, WIDTH,
        )  # fmt: skip
        in_tile = (column < out_width)[:, None] & there[None, :]
        elements = column[:, None] * pixel_stride + channel[None, :] * out_channel_stride
        for r in tl.static_range(ROWS):
            inside = in_tile & (first + r < out_height)
            place = image * out_image_stride + (first + r) * (out_width * pixel_stride)
            d = tl.load(gradient + place + elements, mask=inside, other=0.0).to(tl.float32)
            # Positions outside the output must not make the sums infinite.
            z, n = tl.where(inside, products[r], 0.0), tl.where(inside, norms[r], 1.0)
            inverse = reciprocal(n, FAST)
            found = parts(z, n, inverse, own, angular, outer, MAGNITUDE, ANGLE, False, WEIGHTED, FAST)
            dz, by_norm, terms = gradients(d, n, inverse, found, outer, SUMMED, COUNTS, WEIGHTED)
            tl.store(product_gradient + place + elements, dz.to(product_gradient.dtype.element_ty), mask=inside)
            by_norm = (by_norm * inverse).to(norm_gradient.dtype.element_ty)
            tl.store(norm_gradient + place + elements, by_norm, mask=inside)
            if MEAN == 1:
                inverse = inverse.to(inverse_norms.dtype.element_ty)
                tl.store(inverse_norms + place + elements, inverse, mask=inside)
            if BIAS:
                terms = terms + (d,)
            added: Block = ()
            for i in tl.static_range(COUNT):
                added = added + (totals[i] + terms[i],)
            totals = added
    by_mean = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.sum(totals[i], 0)
        tl.store(sums + (tl.program_id(0) * COUNT + i) * channels + channel, row, mask=there)
        if i < len(SUMMED):
            if RELATIVE[SUMMED[i]]:
                stored = tl.load(table + SUMMED[i] * channels + channel, mask=there, other=0.0)
                by_mean += tl.where(there, row, 0.0) * stored
    if MEAN == 1:
        tl.store(mean_sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(by_mean))


@device_function
def depthwise_gradient_kernel(
    product_gradient: Block,
    norm_gradient: Block,
    inverse_norms: Block,
    mean_sums: Block,
    input: Block,
    unit: Block,
    input_gradient: Block,
    filter_sums: Block,
    count: Block,
    of: Block,
    tiles: Block,
    row_blocks: Block,
    column_blocks: Block,
    height: Block,
    width: Block,
    out_height: Block,
    out_width: Block,
    image_stride: Block,
    pixel_stride: Block,
    channel_stride: Block,
    out_image_stride: Block,
    out_channel_stride: Block,
    channels: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    EVERY: constexpr,
    MEAN: constexpr,
    SUMS: constexpr,
    INPUT: constexpr,
    WEIGHT: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> None:
    """dx, and the gradient of the normalized filters as partial sums, one [position in the window, channel] a program.

    Both read the gradients of the same patches: those that see a pixel.
    """
    HIGH: constexpr = KERNEL[0]
    WIDE: constexpr = KERNEL[1]
    by_mean = 0.0
    if INPUT & (MEAN == 1):
        part = tl.arange(0, SUMS)
        by_mean = tl.sum(tl.load(mean_sums + part, mask=part < count, other=0.0)) / of
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    totals = zero_tiles(HIGH * WIDE * WEIGHT, BLOCK, WIDTH)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        image, first, column = place_of(t, row_blocks, column_blocks, ROWS, BLOCK)
        x = load_rows(
            input + image * image_stride, first, column, channel, there, height, width, pixel_stride, channel_stride,
            (1, 1), EVERY,
        )  # fmt: skip
        top, start = first + PADDING[0] - (HIGH - 1) * DILATION[0], image * out_image_stride
        found, norms = zero_tiles(ROWS, BLOCK, WIDTH), zero_tiles(len(READ), BLOCK, WIDTH)
        made: Block = ()
        if (WIDE > 3) & (not WEIGHT):
            for j in tl.range(WIDE):
                found, norms, _ = add_patches(
                    found, norms, by_mean, product_gradient + start, norm_gradient + start, inverse_norms + start, unit,
                    top, column + PADDING[1] - j * DILATION[1], channel, there, out_height, out_width, pixel_stride,
                    out_channel_stride, channels, j, KERNEL, STRIDE, DILATION, READ, MEAN, INPUT, ROWS, BLOCK,
                )  # fmt: skip
        else:
            for j in tl.static_range(WIDE):
                found, norms, dz = add_patches(
                    found, norms, by_mean, product_gradient + start, norm_gradient + start, inverse_norms + start, unit,
                    top, column + PADDING[1] - j * DILATION[1], channel, there, out_height, out_width, pixel_stride,
                    out_channel_stride, channels, j, KERNEL, STRIDE, DILATION, READ, MEAN, INPUT, ROWS, BLOCK,
                )  # fmt: skip
                if WEIGHT:
                    made = made + filter_terms(totals, x, dz, j, KERNEL, DILATION, ROWS)
        totals = made
        if INPUT:
            store_input_gradient(
                input_gradient + image * image_stride, found, x, norms, first, column, channel, there, height, width,
                pixel_stride, channel_stride, KERNEL, DILATION, ROWS,
            )  # fmt: skip
    if WEIGHT:
        for j in tl.static_range(WIDE):
            for i in tl.static_range(HIGH):
                onto = filter_sums + ((tl.program_id(0) * HIGH + i) * WIDE + j) * channels + channel
                tl.store(onto, tl.sum(totals[j * HIGH + i], 0), mask=there)


@device_function
def add_patches(
    found: Block,
    norms: Block,
    by_mean: Block,
    product_gradient: Block,
    norm_gradient: Block,
    inverse_norms: Block,
    unit: Block,
    top: Block,
    column: Block,
    channel: Block,
    there: Block,
    out_height: Block,
    out_width: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    j: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    MEAN: constexpr,
    INPUT: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> Block:
    """Both parts of dx, plus those of patches that see a pixel in column j of their window; and the dz of these."""
    dz = load_rows(
        product_gradient, top, column, channel, there, out_height, out_width, pixel_stride, channel_stride, STRIDE, READ
    )
    if INPUT:
        by_norm = load_rows(
            norm_gradient, top, column, channel, there, out_height, out_width, pixel_stride, channel_stride, STRIDE,
            READ,
        )  # fmt: skip
        norms = add_tiles(norms, by_norm, 1.0, READ)
        if MEAN == 1:
            inverse = load_rows(
                inverse_norms, top, column, channel, there, out_height, out_width, pixel_stride, channel_stride,
                STRIDE, READ,
            )  # fmt: skip
            norms = add_tiles(norms, inverse, by_mean, READ)
        w = load_filters(unit, channel, there, channels, j, KERNEL, BLOCK)
        found = add_gradients(found, dz, w, KERNEL, DILATION, ROWS)
    return found, norms, dz


@device_function
def add_tiles(tiles: Block, more: Block, factor: Block, READ: constexpr) -> Block:
    """tiles + factor more."""
    found: Block = ()
    for k in tl.static_range(len(READ)):
        found = found + (tiles[k] + factor * more[k],)
    return found


@device_function
def add_gradients(gradients: Block, dz: Block, w: Block, KERNEL: constexpr, DILATION: constexpr,
                  ROWS: constexpr) -> Block:  # fmt: skip
    """The gradients of inner products with respect to pixels, plus those by one column of the filters."""
    HIGH: constexpr = KERNEL[0]
    found: Block = ()
    for r in tl.static_range(ROWS):
        total = gradients[r]
        for i in tl.static_range(HIGH):
            total += dz[r + (HIGH - 1 - i) * DILATION[0]] * w[i]
        found = found + (total,)
    return found


@device_function
def filter_terms(totals: Block, x: Block, dz: Block, J: constexpr, KERNEL: constexpr, DILATION: constexpr,
                 ROWS: constexpr) -> Block:  # fmt: skip
    """The sums for column J of the filters, plus those of this tile."""
    HIGH: constexpr = KERNEL[0]
    found: Block = ()
    for i in tl.static_range(HIGH):
        total = totals[J * HIGH + i]
        for r in tl.static_range(ROWS):
            total += x[r] * dz[r + (HIGH - 1 - i) * DILATION[0]]
        found = found + (total,)
    return found


@device_function
def store_input_gradient(
    onto: Block,
    found: Block,
    x: Block,
    norms: Block,
    first: Block,
    column: Block,
    channel: Block,
    there: Block,
    height: Block,
    width: Block,
    pixel_stride: Block,
    channel_stride: Block,
    KERNEL: constexpr,
    DILATION: constexpr,
    ROWS: constexpr,
) -> None:
    """dx: the part of the inner products, and x times the sum of dn / n over all patches that see the pixel."""
    HIGH: constexpr = KERNEL[0]
    elements = column[:, None] * pixel_stride + channel[None, :] * channel_stride
    inside = (column < width)[:, None] & there[None, :]
    for r in tl.static_range(ROWS):
        factor = norms[r]
        for i in tl.static_range(1, HIGH):
            factor += norms[r + i * DILATION[0]]
        dx = (found[r] + factor * x[r]).to(onto.dtype.element_ty)
        tl.store(onto + (first + r) * (width * pixel_stride) + elements, dx, mask=inside & (first + r < height))


@device_function
def depthwise_sum_kernel(
    filter_sums: Block,
    unit_gradient: Block,
    programs: Block,
    channels: Block,
    TAPS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> None:
    """The gradient of the normalized filters [channel, position in the window]: adds the sums of all programs."""
    tap, channel = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        elements = (program * TAPS + tap)[:, None] * channels + channel[None, :]
        total += tl.load(filter_sums + elements, mask=(program < programs)[:, None] & there[None, :], other=0.0)
    tl.store(unit_gradient + channel * TAPS + tap, tl.sum(total, 0), mask=there)
