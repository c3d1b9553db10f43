"""Kernels for filters and channel constants, one program per filter, before and after the convolution."""

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels.device_helpers import root

# KINDS has four numbers for each constant: learned, per channel, positive, and the floor. A positive constant is stored
# as r and has the value r^2 + floor.


@device_function
def source(
    i: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
) -> Block:
    """The offset in the weights of element i of a filter, in the order of the convolution."""
    if LAST:
        channel, tap = i % CHANNELS, i // CHANNELS
    else:
        channel, tap = i // (KERNEL[0] * KERNEL[1]), i % (KERNEL[0] * KERNEL[1])
    return channel * channel_step + tap // KERNEL[1] * height_step + tap % KERNEL[1] * width_step


@device_function
def constant(given: Block, channel: Block, KINDS: constexpr, K: constexpr) -> Block:
    """The value of constant K for a channel, from the stored tensor or as the fixed number."""
    if KINDS[4 * K]:
        value = tl.load(given + channel * KINDS[4 * K + 1]).to(tl.float32)
        if KINDS[4 * K + 2]:
            value = value * value + KINDS[4 * K + 3]
    else:
        value = given
    return value


@device_function
def filter_size(row: Block, size: Block, eps: Block, channel_step: Block, height_step: Block, width_step: Block,
                CHANNELS: constexpr, KERNEL: constexpr, LAST: constexpr) -> Block:  # fmt: skip
    """||w|| = sqrt(sum w^2 + eps)."""
    squares = tl.zeros([1024], tl.float32)
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        squares += w * w
    return root(tl.sum(squares) + eps)


@device_function
def normalize_filter(
    c: Block,
    weight: Block,
    unit: Block,
    table: Block,
    stored: Block,
    filters: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    eps: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
    KINDS: constexpr,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    SCALE: constexpr,
    WEIGHTING: constexpr,
    FAST: constexpr,
) -> None:
    """w / ||w||, and the channel's column of the table: the constants, a, b and ||w||."""
    row = weight + c.to(tl.int64) * row_stride
    norm = filter_size(row, size, eps, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        tl.store(unit + c.to(tl.int64) * size + i, (w / norm).to(unit.dtype.element_ty), mask=i < size)
    store_constants(c, norm, table, stored, filters, KINDS, MAGNITUDE, COUNTS, SCALE, WEIGHTING, FAST)


@device_function
def store_constants(c: Block, norm: Block, table: Block, stored: Block, filters: Block, KINDS: constexpr,
                    MAGNITUDE: constexpr, COUNTS: constexpr, SCALE: constexpr, WEIGHTING: constexpr,
                    FAST: constexpr) -> None:  # fmt: skip
    """The channel's column of the table: the constants, a, b and ||w||."""
    COUNT: constexpr = COUNTS[0] + COUNTS[1]
    own: Block = ()
    for k in tl.static_range(COUNT):
        value = constant(stored[k], c, KINDS, k)
        tl.store(table + k * filters + c, value)
        if k < COUNTS[0]:
            own = own + (value,)
    outer = weigh(norm, own, MAGNITUDE, SCALE, WEIGHTING, FAST)
    tl.store(table + (COUNTS[0] + COUNTS[1]) * filters + c, outer[0])
    tl.store(table + (COUNTS[0] + COUNTS[1] + 1) * filters + c, outer[1])
    tl.store(table + (COUNTS[0] + COUNTS[1] + 2) * filters + c, norm)


@device_function
def weigh(norm: Block, own: Block, MAGNITUDE: constexpr, SCALE: constexpr, WEIGHTING: constexpr,
          FAST: constexpr) -> Block:  # fmt: skip
    """a, b, and their derivatives, as `Weighting.device` defines them."""
    h = MAGNITUDE(norm, *own, FAST)
    scale = 1.0
    if SCALE >= 0:
        scale = own[SCALE]
    return WEIGHTING(norm, h[0], scale)


@device_function
def filter_gradient_kernel(
    unit_gradient: Block,
    weight: Block,
    table: Block,
    kept: Block,
    stored: Block,
    sums: Block,
    weight_gradient: Block,
    bias_gradient: Block,
    gradients: Block,
    programs: Block,
    filters: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
    KINDS: constexpr,
    RELATIVE: constexpr,
    SUMMED: constexpr,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    SCALE: constexpr,
    WEIGHTING: constexpr,
    WEIGHTED: constexpr,
    BIAS: constexpr,
    WEIGHT: constexpr,
    PROGRAMS: constexpr,
    FAST: constexpr,
) -> None:
    """The gradients of a filter and its channel's constants, from the gradient of w / ||w|| and the partial sums."""
    c = tl.program_id(0)
    ROWS: tl.constexpr = len(SUMMED) + 2 * WEIGHTED + BIAS
    norm = tl.load(table + (COUNTS[0] + COUNTS[1] + 2) * filters + c)
    OWN: constexpr = COUNTS[0]
    own: Block = ()
    for k in tl.static_range(OWN):
        own = own + (tl.load(table + k * filters + c),)
    by_norm, by_factor = 0.0, 0.0
    h = MAGNITUDE(norm, *own, FAST)
    outer = weigh(norm, own, MAGNITUDE, SCALE, WEIGHTING, FAST)
    if WEIGHTED:
        by_factor = channel_sum(sums, c, programs, filters, len(SUMMED), ROWS, PROGRAMS)
        by_argument = channel_sum(sums, c, programs, filters, len(SUMMED) + 1, ROWS, PROGRAMS)
        by_norm = by_factor * (outer[2] + outer[4] * h[1]) + by_argument * outer[3]
    if BIAS:
        tl.store(bias_gradient + c, channel_sum(sums, c, programs, filters, ROWS - 1, ROWS, PROGRAMS))
    for i in tl.static_range(len(SUMMED)):
        by_value = channel_sum(sums, c, programs, filters, i, ROWS, PROGRAMS)
        if RELATIVE[SUMMED[i]]:
            by_value *= tl.load(kept)
        if WEIGHTED & (SUMMED[i] < COUNTS[0]):
            by_value += by_factor * outer[4] * h[2 + SUMMED[i]]
        if WEIGHTED & (SUMMED[i] == SCALE):
            by_value += by_factor * outer[5]
        if KINDS[4 * SUMMED[i]]:
            if KINDS[4 * SUMMED[i] + 2]:
                by_value *= 2 * tl.load(stored[SUMMED[i]] + c * KINDS[4 * SUMMED[i] + 1]).to(tl.float32)
            tl.store(gradients[i] + c, by_value.to(gradients[i].dtype.element_ty))
    if WEIGHT:
        filter_gradient(
            c, unit_gradient, weight, weight_gradient, norm, by_norm, 1.0, size, row_stride, channel_step,
            height_step, width_step, CHANNELS, KERNEL, LAST,
        )  # fmt: skip


@device_function
def filter_gradient(
    c: Block,
    unit_gradient: Block,
    weight: Block,
    weight_gradient: Block,
    norm: Block,
    by_norm: Block,
    scale: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
) -> None:
    """dw = d / ||w|| + w (by_norm - <d, w> / ||w||^2) / ||w||, where d is the gradient of w / ||w|| times the scale."""
    row, onto = weight + c.to(tl.int64) * row_stride, weight_gradient + c.to(tl.int64) * row_stride
    along = tl.zeros([1024], tl.float32)
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        along += w * tl.load(unit_gradient + c.to(tl.int64) * size + i, mask=i < size, other=0.0).to(tl.float32)
    outward = (by_norm - scale * tl.sum(along) / (norm * norm)) / norm
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        d = tl.load(unit_gradient + c.to(tl.int64) * size + i, mask=i < size, other=0.0).to(tl.float32)
        tl.store(onto + place, (d * (scale / norm) + w * outward).to(weight_gradient.dtype.element_ty), mask=i < size)


@device_function
def channel_sum(sums: Block, c: Block, programs: Block, filters: Block, ROW: constexpr, ROWS: constexpr,
                PROGRAMS: constexpr) -> Block:  # fmt: skip
    """One sum of a channel over all programs, in a fixed order."""
    program = tl.arange(0, PROGRAMS)
    return tl.sum(tl.load(sums + (program * ROWS + ROW) * filters + c, mask=program < programs, other=0.0))


@device_function
def unit_kernel(
    weight: Block,
    unit: Block,
    norms: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    eps: Block,
    scale: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
) -> None:
    """scale w / ||w||, and ||w||, of a filter."""
    c = tl.program_id(0)
    row = weight + c.to(tl.int64) * row_stride
    norm = filter_size(row, size, eps, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
    tl.store(norms + c, norm)
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        place = source(i, channel_step, height_step, width_step, CHANNELS, KERNEL, LAST)
        w = tl.load(row + place, mask=i < size, other=0.0).to(tl.float32)
        tl.store(unit + c.to(tl.int64) * size + i, (w * (scale / norm)).to(unit.dtype.element_ty), mask=i < size)


@device_function
def unit_gradient_kernel(
    unit_gradient: Block,
    weight: Block,
    norms: Block,
    weight_gradient: Block,
    size: Block,
    row_stride: Block,
    channel_step: Block,
    height_step: Block,
    width_step: Block,
    scale: Block,
    CHANNELS: constexpr,
    KERNEL: constexpr,
    LAST: constexpr,
) -> None:
    """The gradient of a filter from the gradient of scale w / ||w||."""
    c = tl.program_id(0)
    filter_gradient(
        c, unit_gradient, weight, weight_gradient, tl.load(norms + c), 0.0, scale, size, row_stride, channel_step,
        height_step, width_step, CHANNELS, KERNEL, LAST,
    )  # fmt: skip
