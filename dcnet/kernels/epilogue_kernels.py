"""The kernel before a convolution whose epilogue computes the output: one factor per patch, one rate per channel."""

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.device_helpers import channel_constants, keep_means, mean_norm, split


@device_function
def factor_kernel(
    norm: Block,
    table: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    factor: Block,
    rate: Block,
    kept: Block,
    count: Block,
    of: Block,
    decay: Block,
    positions: Block,
    filters: Block,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    SUMS: constexpr,
    TANH: constexpr,
    WIDTH: constexpr,
    BLOCK: constexpr,
    FAST: constexpr,
) -> None:
    """Computes h(n) / n for every patch. If TANH, alpha / n for every patch, and 1 / radius for every channel."""
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    # All channels share the constants, except for the radius of TANH.
    own, _, _ = split(channel_constants(table, mean, 1, filters, KNOWN, RELATIVE, 1, 1), 0, COUNTS)
    position = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    there = position < positions
    n = tl.load(norm + position, mask=there, other=1.0)
    if TANH:
        tl.store(factor + position, own[0] / n, mask=there)
        if tl.program_id(0) == 0:
            of_channels = channel_constants(table, mean, filters, filters, KNOWN, RELATIVE, 1, WIDTH)
            column = tl.arange(0, WIDTH)[None, :]
            tl.store(rate + column, 1 / of_channels[1], mask=column < filters)
    else:
        tl.store(factor + position, MAGNITUDE(n, *own, FAST)[0] / n, mask=there)
