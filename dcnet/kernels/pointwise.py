"""The pass over whole tensors from inner products to outputs.

What belongs to a position, the norm and its gradient, lies as [group, position] in float32; what belongs to a channel,
the constants, as [constant, channel].
"""

from dcnet.device import Block, at_least, at_most, constexpr, device_function, tl
from dcnet.kernels.constants import channel_constants, keep_means, mean_norm, split
from dcnet.kernels.tiles import chunk_of, tile


@device_function
def load_product(product: Block, inside: Block) -> Block:
    """Inner products in float32; those beyond the range of float16 count as its largest number."""
    z = tl.load(product, mask=inside, other=0.0).to(tl.float32)
    if product.dtype.element_ty == tl.float16:
        z = at_most(at_least(z, -65504.0), 65504.0)
    return z


@device_function
def inverse_norm(n: Block, product: Block) -> Block:
    """1 / n; NaN where n is infinite, and inner products with it are not."""
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
