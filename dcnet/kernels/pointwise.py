"""The passes over whole tensors: from inner products to outputs, back again, and the norm's part of dx.

A tensor of a group is seen as positions x channels, in `images` pieces of `pixels` positions each: channels last it is
one piece, since all positions have the same distance, otherwise one an image. What belongs to a position, the norm and
its gradient, lies as [group, position] in float32; what belongs to a channel, the constants, as [constant, channel].
"""

from dcnet.device import Block, constexpr, device_function, reciprocal, tl


@device_function
def tile(
    t: Block,
    blocks: Block,
    pixels: Block,
    image_stride: Block,
    pixel_stride: Block,
    group_stride: Block,
    ONE: constexpr,
    BLOCK: constexpr,
) -> Block:
    """Of tile t: its positions, which of them exist, and where the first of them lies in the group's channels."""
    row = tl.arange(0, BLOCK)
    start = tl.program_id(1).to(tl.int64) * group_stride
    if ONE:
        first = t * BLOCK
        position = first + row
    else:
        image, first = t // blocks, (t % blocks) * BLOCK
        position = image * pixels + first + row
        start += image.to(tl.int64) * image_stride
    start += first.to(tl.int64) * pixel_stride
    return position, first + row < pixels, start


@device_function
def chunk_of(
    there: Block,
    pixel_stride: Block,
    channel_stride: Block,
    channels: Block,
    CHUNK: constexpr,
    BLOCK: constexpr,
    WIDTH: constexpr,
) -> Block:
    """Where the elements of a chunk of a tile's channels lie, and which of them exist."""
    row, column = tl.arange(0, BLOCK), CHUNK * WIDTH + tl.arange(0, WIDTH)
    elements = row[:, None] * pixel_stride + column[None, :] * channel_stride
    return elements, there[:, None] & (column < channels)[None, :]


@device_function
def channel_constants(
    table: Block,
    mean: Block,
    channels: Block,
    total: Block,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    CHUNKS: constexpr,
    WIDTH: constexpr,
) -> Block:
    """All constants of the group's channels, chunk by chunk, each [1, channels]; the relative ones times the mean norm.

    Those that are not learned are known when the kernel is compiled: a scale of 1 then costs nothing.
    """
    COUNT: constexpr = len(KNOWN)
    values: Block = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        for i in tl.static_range(COUNT):
            if KNOWN[i] is None:
                row = table + i * total + tl.program_id(1) * channels
                value = tl.load(row + column, mask=column < channels, other=1.0)[None, :]
            else:
                value = tl.full([1, 1], KNOWN[i], tl.float32)
            if RELATIVE[i]:
                value = value * mean
            values = values + (value,)
    return values


@device_function
def mean_norm(sums: Block, running: Block, count: Block, of: Block, MEAN: constexpr, SUMS: constexpr) -> Block:
    """The mean norm: of the batch, from its partial sums, the running one (1 before the first batch), or just 1."""
    if MEAN == 1:
        part = tl.arange(0, SUMS)
        mean = tl.sum(tl.load(sums + part, mask=part < count, other=0.0)) / of
    elif MEAN == 2:
        given = tl.load(running).to(tl.float32)
        mean = tl.where(given > 0, given, 1.0)
    else:
        mean = 1.0
    return mean


@device_function
def keep_means(mean: Block, running: Block, kept: Block, decay: Block, UPDATE: constexpr) -> None:
    """Writes the mean norm for the backward, and where the running mean goes from here, beside it or in its place."""
    tl.store(kept, mean)
    if UPDATE > 0:
        before = tl.load(running).to(tl.float32)
        after = tl.where(before > 0, decay * before + (1 - decay) * mean, mean)
        usable = (mean > 0) & (mean < float("inf"))
        after = tl.where(usable, after, before)
        if UPDATE == 1:
            tl.store(kept + 1, after)
        else:
            tl.store(running, after.to(running.dtype.element_ty))


@device_function
def apply_kernel(
    product: Block,
    norm: Block,
    table: Block,
    bias: Block,
    sums: Block,
    running: Block,
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
        keep_means(mean, running, kept, decay, UPDATE)
    constants = channel_constants(table, mean, channels, total, KNOWN, RELATIVE, CHUNKS, WIDTH)
    blocks = tl.cdiv(pixels, BLOCK)
    positions = images * pixels
    for t in tl.range(tl.program_id(0), images * blocks, tl.num_programs(0), num_stages=STAGES):
        position, there, start = tile(
            t, blocks, pixels, image_stride, pixel_stride, channels * channel_stride, ONE, BLOCK
        )
        n = tl.load(norm + tl.program_id(1) * positions + position, mask=there, other=1.0)[:, None]
        inverse = 1 / n
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            z = tl.load(product + start + elements, mask=inside, other=0.0).to(tl.float32)
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
def split(constants: Block, CHUNK: constexpr, COUNTS: constexpr) -> Block:
    """The constants of a chunk: those of the magnitude, those of the angle, and a and b."""
    FIRST: constexpr = CHUNK * (COUNTS[0] + COUNTS[1] + 2)
    ANGULAR: constexpr = FIRST + COUNTS[0]
    OUTER: constexpr = ANGULAR + COUNTS[1]
    return constants[FIRST:ANGULAR], constants[ANGULAR:OUTER], constants[OUTER : OUTER + 2]


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
    """From dy to dz, to dn / n of every position, and to the sums over positions of all that channels share.

    `saved` is z, or y where the angle can be told from it. The sums are those of the learned constants, in their order,
    of a and b with a weighting, and of the bias; one row a program, so that their order is the same each time.
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
        inverse = 1 / n
        at_position = tl.zeros([BLOCK], tl.float32)
        added: Block = ()
        for chunk in tl.static_range(CHUNKS):
            elements, inside = chunk_of(there, pixel_stride, channel_stride, channels, chunk, BLOCK, WIDTH)
            own, angular, outer = split(constants, chunk, COUNTS)
            d = tl.load(gradient + start + elements, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(saved + start + elements, mask=inside, other=0.0).to(tl.float32)
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
        # The magnitude is positive here, but may be too small to be divided by.
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
    """Writes this program's sums, and its part of the gradient of the batch's mean norm."""
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
    """dx += factor x, with one factor a position: the norm's part of the gradient."""
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
