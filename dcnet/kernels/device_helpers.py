"""Device functions shared by the kernels: tiles of a tensor, constants of channels, roots, and the mean norm.

A program processes tiles of positions and chunks of channels. The tensor of a group is viewed as positions x channels,
in `images` pieces of `pixels` positions each: one piece if it is channels last, otherwise one per image.
"""

from dcnet.device_functions import Block, at_least, constexpr, device_function, tl


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
    """The positions of tile t, a mask of those that exist, and the offset of the first in the group's first channel."""
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
    """The offsets of the elements in a chunk of channels, and a mask of those that exist."""
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
    """All constants of the group's channels, chunk by chunk, each [1, channels]; relative ones times the mean norm.

    Constants that are not learned are compile-time values: a scale of 1 then costs nothing.
    """
    values: Block = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        channel = tl.program_id(1) * channels + column
        values = values + constants_of(table, mean, channel, column < channels, total, KNOWN, RELATIVE)
    return values


@device_function
def constants_of(table: Block, mean: Block, channel: Block, there: Block, total: Block, KNOWN: constexpr,
                 RELATIVE: constexpr) -> Block:  # fmt: skip
    """All constants of some channels, as `channel_constants` returns them."""
    COUNT: constexpr = len(KNOWN)
    values: Block = ()
    for i in tl.static_range(COUNT):
        if KNOWN[i] is None:
            value = tl.load(table + i * total + channel, mask=there, other=1.0)[None, :]
        else:
            value = tl.full([1, 1], KNOWN[i], tl.float32)
        if RELATIVE[i]:
            value = value * mean
        values = values + (value,)
    return values


@device_function
def root(squares: Block) -> Block:
    """The square root, at least that of the smallest normal number, so that norms can be divisors."""
    return tl.sqrt(at_least(squares, 1.1754943508222875e-38))


@device_function
def split(constants: Block, CHUNK: constexpr, COUNTS: constexpr) -> Block:
    """Splits the constants of a chunk into those of the magnitude, those of the angle, and a and b."""
    FIRST: constexpr = CHUNK * (COUNTS[0] + COUNTS[1] + 2)
    ANGULAR: constexpr = FIRST + COUNTS[0]
    OUTER: constexpr = ANGULAR + COUNTS[1]
    return constants[FIRST:ANGULAR], constants[ANGULAR:OUTER], constants[OUTER : OUTER + 2]


@device_function
def mean_norm(sums: Block, running: Block, count: Block, of: Block, MEAN: constexpr, SUMS: constexpr) -> Block:
    """The mean norm: the batch mean from partial sums, the running mean (1 before the first batch), or 1."""
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
def keep_means(
    mean: Block, running: Block, tracked: Block, kept: Block, decay: Block, UPDATE: constexpr, COUNTED: constexpr
) -> None:
    """Writes the mean norm for the backward pass, and the next running mean with its count, to the state or in place.

    The decay warms up with the count, as in `dcnet.norms.warmed_up`.
    """
    tl.store(kept, mean)
    if UPDATE > 0:
        before = tl.load(running).to(tl.float32)
        usable = (mean > 0) & (mean < float("inf"))
        share = decay
        if COUNTED:
            count = tl.load(tracked)
            seen = tl.where(before > 0, count, 0)
            share = tl.minimum(decay, (1 + seen).to(tl.float32) / (10 + seen).to(tl.float32))
            count = tl.where(usable, seen + 1, count)
            if UPDATE == 1:
                tl.store(kept + 2, count.to(tl.float32))
            else:
                tl.store(tracked, count)
        after = tl.where(before > 0, share * before + (1 - share) * mean, mean)
        after = tl.where(usable, after, before)
        if UPDATE == 1:
            tl.store(kept + 1, after)
        else:
            tl.store(running, after.to(running.dtype.element_ty))
