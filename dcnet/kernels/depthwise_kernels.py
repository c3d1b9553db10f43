"""Forward kernels of depthwise convolutions, which compute inner products and norms of a channel's patches together.

A program computes tiles of ROWS rows, BLOCK columns and WIDTH channels, one after another, always with the same
channels. Neighboring rows of a tile share what they read. Filters are [position in the window, channel] in float32.
"""

from dcnet.device_functions import Block, constexpr, device_function, reciprocal, tl
from dcnet.kernels.device_helpers import constants_of, keep_means, mean_norm, root
from dcnet.kernels.filter_kernels import filter_size, source, store_constants
from dcnet.kernels.pointwise_kernels import magnitude_times_angle


@device_function
def place_of(t: Block, row_blocks: Block, column_blocks: Block, ROWS: constexpr, BLOCK: constexpr) -> Block:
    """The image of tile t, its first row, and its columns."""
    above = t // column_blocks
    column = (t % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    return (above // row_blocks).to(tl.int64), (above % row_blocks) * ROWS, column


@device_function
def load_rows(
    start: Block,
    first: Block,
    column: Block,
    channel: Block,
    there: Block,
    height: Block,
    width: Block,
    pixel_stride: Block,
    channel_stride: Block,
    STEPS: constexpr,
    READ: constexpr,
) -> Block:
    """The rows of an image from `first` on at some columns, each [columns, channels] in float32; zeros outside of it.

    With STEPS above 1, rows and columns are those of an image that is larger by these factors, whose pixels in between
    are zeros. Only rows with READ are read.
    """
    inside = column >= 0
    if STEPS[1] > 1:
        inside = inside & (column % STEPS[1] == 0)
        column = column // STEPS[1]
    mask = (inside & (column < width))[:, None] & there[None, :]
    elements = column[:, None] * pixel_stride + channel[None, :] * channel_stride
    found: Block = ()
    for k in tl.static_range(len(READ)):
        if READ[k]:
            row = first + k
            exists = row >= 0
            if STEPS[0] > 1:
                exists = exists & (row % STEPS[0] == 0)
                row = row // STEPS[0]
            exists = exists & (row < height)
            x = tl.load(start + row * (width * pixel_stride) + elements, mask=mask & exists, other=0.0)
            found = found + (x.to(tl.float32),)
        else:
            found = found + (0.0,)
    return found


@device_function
def load_filters(unit: Block, channel: Block, there: Block, channels: Block, j: Block, KERNEL: constexpr,
                 BLOCK: constexpr) -> Block:  # fmt: skip
    """Column j of the filters, each row [columns, channels].

    Every thread reads what it needs: a row [1, channels] would be exchanged between threads, with a barrier each time.
    """
    HIGH: constexpr = KERNEL[0]
    every = tl.zeros([BLOCK, 1], tl.int32)
    elements, mask = channel[None, :] + every, there[None, :] & (every == 0)
    found: Block = ()
    for i in tl.static_range(HIGH):
        found = found + (tl.load(unit + (i * KERNEL[1] + j) * channels + elements, mask=mask, other=0.0),)
    return found


@device_function
def zero_tiles(COUNT: constexpr, BLOCK: constexpr, WIDTH: constexpr) -> Block:
    """Tiles of zeros."""
    tiles: Block = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([BLOCK, WIDTH], tl.float32),)
    return tiles


@device_function
def products_and_norms(
    start: Block,
    unit: Block,
    first: Block,
    column: Block,
    channel: Block,
    there: Block,
    height: Block,
    width: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    eps: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    PRODUCTS: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> Block:
    """The inner products of a tile, unless only norms are asked for, and its norms; one element of a tuple per row.

    Squares are first added along the rows of the input, and then once for every row of the output that sees them.
    """
    WIDE: constexpr = KERNEL[1]
    products = zero_tiles(ROWS, BLOCK, WIDTH)
    squares = zero_tiles(len(READ), BLOCK, WIDTH)
    top, left = first * STRIDE[0] - PADDING[0], column * STRIDE[1] - PADDING[1]
    if WIDE > 3:
        # Unrolled, a wide window would fill the registers with pixels and filters that are read too early.
        for j in tl.range(WIDE):
            products, squares = add_column(
                products, squares, start, unit, top, left + j * DILATION[1], channel, there, height, width,
                pixel_stride, channel_stride, channels, j, KERNEL, STRIDE, DILATION, READ, PRODUCTS, ROWS, BLOCK,
            )  # fmt: skip
    else:
        for j in tl.static_range(WIDE):
            products, squares = add_column(
                products, squares, start, unit, top, left + j * DILATION[1], channel, there, height, width,
                pixel_stride, channel_stride, channels, j, KERNEL, STRIDE, DILATION, READ, PRODUCTS, ROWS, BLOCK,
            )  # fmt: skip
    return products, window_norms(squares, eps, KERNEL, STRIDE, DILATION, ROWS)


@device_function
def add_column(
    products: Block,
    squares: Block,
    start: Block,
    unit: Block,
    top: Block,
    column: Block,
    channel: Block,
    there: Block,
    height: Block,
    width: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    j: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    PRODUCTS: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> Block:
    """Inner products and squares, plus those of column j of the window."""
    x = load_rows(start, top, column, channel, there, height, width, pixel_stride, channel_stride, (1, 1), READ)
    if PRODUCTS:
        w = load_filters(unit, channel, there, channels, j, KERNEL, BLOCK)
        products = add_products(products, x, w, KERNEL, STRIDE, DILATION, ROWS)
    more: Block = ()
    for k in tl.static_range(len(READ)):
        more = more + (squares[k] + x[k] * x[k],)
    return products, more


@device_function
def add_products(products: Block, x: Block, w: Block, KERNEL: constexpr, STRIDE: constexpr, DILATION: constexpr,
                 ROWS: constexpr) -> Block:  # fmt: skip
    """The products plus those of one column of the filters."""
    HIGH: constexpr = KERNEL[0]
    found: Block = ()
    for r in tl.static_range(ROWS):
        total = products[r]
        for i in tl.static_range(HIGH):
            total += x[r * STRIDE[0] + i * DILATION[0]] * w[i]
        found = found + (total,)
    return found


@device_function
def window_norms(squares: Block, eps: Block, KERNEL: constexpr, STRIDE: constexpr, DILATION: constexpr,
                 ROWS: constexpr) -> Block:  # fmt: skip
    """The norms of patches, from the sums of squares along the rows of the input."""
    HIGH: constexpr = KERNEL[0]
    found: Block = ()
    for r in tl.static_range(ROWS):
        total = squares[r * STRIDE[0]]
        for i in tl.static_range(1, HIGH):
            total += squares[r * STRIDE[0] + i * DILATION[0]]
        found = found + (root(total + eps),)
    return found


@device_function
def depthwise_prepare_kernel(
    input: Block,
    sums: Block,
    weight: Block,
    unit: Block,
    table: Block,
    stored: Block,
    programs: Block,
    blocks: Block,
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
    filters: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    eps: Block,
    KERNEL: constexpr,
    STRIDE: constexpr,
    PADDING: constexpr,
    DILATION: constexpr,
    READ: constexpr,
    CHANNELS: constexpr,
    LAST: constexpr,
    KINDS: constexpr,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    SCALE: constexpr,
    WEIGHTING: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    FAST: constexpr,
) -> None:
    """One partial sum of the norms per program; further programs normalize a filter each."""
    pid = tl.program_id(0)
    if pid < programs * blocks:
        channel = (pid % blocks) * WIDTH + tl.arange(0, WIDTH)
        there = channel < filters
        total = tl.zeros([BLOCK, WIDTH], tl.float32)
        for t in tl.range(pid // blocks, tiles, programs):
            image, first, column = place_of(t, row_blocks, column_blocks, ROWS, BLOCK)
            _, norms = products_and_norms(
                input + image * image_stride, unit, first, column, channel, there, height, width, pixel_stride,
                channel_stride, filters, eps, KERNEL, STRIDE, PADDING, DILATION, READ, False, ROWS, BLOCK, WIDTH,
            )  # fmt: skip
            inside = (column < out_width)[:, None] & there[None, :]
            for r in tl.static_range(ROWS):
                total += tl.where(inside & (first + r < out_height), norms[r], 0.0)
        tl.store(sums + pid, tl.sum(total))
    else:
        c = pid - programs * blocks
        row = weight + c.to(tl.int64) * row_stride
        norm = filter_size(row, size, eps, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        i = tl.arange(0, 64)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        tl.store(unit + i * filters + c, w / norm, mask=i < size)
        store_constants(c, norm, table, stored, filters, KINDS, MAGNITUDE, COUNTS, SCALE, WEIGHTING, FAST)


@device_function
def depthwise_output_kernel(
    input: Block,
    unit: Block,
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
    WEIGHTED: constexpr,
    BIAS: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    SUMS: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
    FAST: constexpr,
) -> None:
    """y = a h(b n) g(z / n) + bias."""
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    constants = constants_of(table, mean, channel, there, channels, KNOWN, RELATIVE)
    offset = 0.0
    if BIAS:
        offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        image, first, column = place_of(t, row_blocks, column_blocks, ROWS, BLOCK)
        products, norms = products_and_norms(
            input + image * image_stride, unit, first, column, channel, there, height, width, pixel_stride,
            channel_stride, channels, eps, KERNEL, STRIDE, PADDING, DILATION, READ, True, ROWS, BLOCK, WIDTH,
        )  # fmt: skip
        inside = (column < out_width)[:, None] & there[None, :]
        elements = column[:, None] * pixel_stride + channel[None, :] * out_channel_stride
        for r in tl.static_range(ROWS):
            y = magnitude_times_angle(
                products[r], norms[r], reciprocal(norms[r], FAST), constants, 0, MAGNITUDE, ANGLE, COUNTS, WEIGHTED,
                FAST,
            )  # fmt: skip
            if BIAS:
                y = y + offset
            onto = output + image * out_image_stride + (first + r) * (out_width * pixel_stride) + elements
            tl.store(onto, y.to(output.dtype.element_ty), mask=inside & (first + r < out_height))
