"""How a program goes over a tensor: tile by tile of its positions, and chunk by chunk of their channels.

A tensor of a group is seen as positions x channels, in `images` pieces of `pixels` positions each: channels last it is
one piece, since all positions have the same distance, otherwise one an image.
"""

from dcnet.device import Block, constexpr, device_function, tl


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
