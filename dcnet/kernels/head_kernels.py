"""Kernels of a margin head: norms, the softmax over the other classes, the loss at the labels, and gradients."""

from dcnet.device_functions import Block, arcsine, at_least, constexpr, device_function, tl

# Kinds of scales and of shares of the margin, and reductions of the losses.
BY_NUMBER, BY_NORM, LEARNED = range(3)
WHOLE, SCHEDULED, AUTOMATIC, KEPT = range(4)
MEAN, SUM, NONE = range(3)


@device_function
def lengths(rows: Block, eps: Block) -> Block:
    """sqrt(sum of squares + eps) of rows [ROWS, WIDTH]; rows whose squares would overflow are scaled down first."""
    small = rows * 8.470329472543003e-22
    squares, scaled = tl.sum(rows * rows, 1), tl.sum(small * small, 1)
    return tl.where(squares < 1e30, tl.sqrt(squares + eps), tl.sqrt(scaled) * 1.1805916207174113e21)


@device_function
def row_tile(row: Block, count: Block, size: Block, WIDTH: constexpr) -> Block:
    """The places of rows in a matrix [count, size], and a mask of those that exist."""
    column = tl.arange(0, WIDTH)
    place = row.to(tl.int64)[:, None] * size + column[None, :]
    return place, (row < count)[:, None] & (column < size)[None, :]


@device_function
def norms_kernel(
    features: Block,
    unit: Block,
    norms: Block,
    weight: Block,
    inverse: Block,
    count: Block,
    classes: Block,
    size: Block,
    blocks: Block,
    eps: Block,
    weight_eps: Block,
    ROWS: constexpr,
    WIDTH: constexpr,
) -> None:
    """Norms and directions of the features, by the first `blocks` programs, and 1 / ||w|| by the others."""
    block = tl.program_id(0)
    if block < blocks:
        row = block * ROWS + tl.arange(0, ROWS)
        place, there = row_tile(row, count, size, WIDTH)
        x = tl.load(features + place, mask=there, other=0.0).to(tl.float32)
        norm = lengths(x, eps)
        tl.store(unit + place, x / norm[:, None], mask=there)
        tl.store(norms + row, norm, mask=row < count)
    else:
        row = (block - blocks) * ROWS + tl.arange(0, ROWS)
        place, there = row_tile(row, classes, size, WIDTH)
        w = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
        tl.store(inverse + row, 1 / lengths(w, weight_eps), mask=row < classes)


@device_function
def scale_of(row: Block, there: Block, norms: Block, logarithm: Block, scale: Block, SCALE: constexpr) -> Block:
    """The scale s of the logits of each row."""
    if SCALE == 1:
        value = tl.load(norms + row, mask=there, other=1.0)
    elif SCALE == 2:
        value = tl.exp(tl.load(logarithm).to(tl.float32))
    else:
        value = scale
    return value


@device_function
def class_sums_kernel(
    products: Block,
    inverse: Block,
    labels: Block,
    norms: Block,
    logarithm: Block,
    partial: Block,
    classes: Block,
    span: Block,
    scale: Block,
    threshold: Block,
    SCALE: constexpr,
    SMOOTHED: constexpr,
    FILTERED: constexpr,
    BLOCK: constexpr,
) -> None:
    """For one row and a span of classes without the label: the largest logit, sum of exp(logit - largest), and sum."""
    row, part = tl.program_id(0), tl.program_id(1)
    first, label = part * span, tl.load(labels + row)
    last = tl.minimum(first + span, classes)
    size = scale_of(row, True, norms, logarithm, scale, SCALE)
    start = products + row.to(tl.int64) * classes
    # The lowest finite number: -inf - -inf would be NaN.
    top = tl.full([BLOCK], -3.4028234e38, tl.float32)
    total, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for block in range(first, last, BLOCK):
        column = block + tl.arange(0, BLOCK)
        inside = column < last
        cos = tl.load(start + column, mask=inside, other=0.0) * tl.load(inverse + column, mask=inside, other=0.0)
        other = inside & (column != label)
        if FILTERED:
            other = other & (cos <= threshold)
        logit = tl.where(other, cos * size, -float("inf"))
        higher = tl.maximum(top, logit)
        total = total * tl.exp(top - higher) + tl.exp(logit - higher)
        top = higher
        if SMOOTHED:
            plain += tl.where(other, logit, 0.0)
    highest = tl.max(top, 0)
    place = partial + (row * tl.num_programs(1) + part) * 3
    tl.store(place, highest)
    tl.store(place + 1, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(place + 2, tl.sum(plain, 0))


@device_function
def cosines_of_labels(row: Block, label: Block, valid: Block, products: Block, inverse: Block, classes: Block) -> Block:
    product = tl.load(products + row.to(tl.int64) * classes + label, mask=valid, other=0.0)
    return product * tl.load(inverse + label, mask=valid, other=0.0)


@device_function
def counts(
    products: Block,
    inverse: Block,
    labels: Block,
    count: Block,
    classes: Block,
    ignored: Block,
    SHARE: constexpr,
    BLOCK: constexpr,
) -> Block:
    """The number of samples that are not ignored, and the sum of their angles in degrees, for automatic annealing."""
    number, degrees = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        label = tl.load(labels + row, mask=row < count, other=0)
        kept = (row < count) & (label != ignored)
        number += tl.where(kept, 1.0, 0.0)
        if SHARE == 2:
            valid = kept & (label >= 0) & (label < classes)
            cos = cosines_of_labels(row, label, valid, products, inverse, classes)
            degrees += tl.where(kept, 57.29577951308232 * (1.5707963267948966 - arcsine(cos)), 0.0)
    return tl.sum(number, 0), tl.sum(degrees, 0)


@device_function
def next_share(
    step: Block,
    eased: Block,
    degrees: Block,
    a: Block,
    b: Block,
    c: Block,
    SHARE: constexpr,
    ADVANCED: constexpr,
) -> Block:
    """The share of the margin, also written to `eased`; a, b and c are the numbers of the annealing.

    Every warp reads the state. The barrier keeps the first one from changing it before the last one has read it.
    """
    time, share = tl.load(step), tl.load(eased)
    tl.debug_barrier()
    if SHARE == 1:
        share = 1 / (1 + at_least(a / (1 + b * time.to(tl.float32)), c))
        tl.store(eased, share)
    elif SHARE == 2:
        allowed = c * tl.minimum(tl.maximum((90 - degrees) / (90 - a), 0.0), 1.0)
        # A batch without a finite angle keeps the share.
        share += b * tl.where((degrees == degrees) & (allowed > share), allowed - share, 0.0)
        tl.store(eased, share)
    elif SHARE != 3:
        share = 1.0
    if ADVANCED:
        tl.store(step, time + 1)
    return share


@device_function
def loss_kernel(
    products: Block,
    inverse: Block,
    labels: Block,
    norms: Block,
    logarithm: Block,
    partial: Block,
    step: Block,
    eased: Block,
    rows: Block,
    numbers: Block,
    loss: Block,
    count: Block,
    classes: Block,
    parts: Block,
    ignored: Block,
    scale: Block,
    smoothing: Block,
    a: Block,
    b: Block,
    c: Block,
    MARGIN: constexpr,
    NUMBERS: constexpr,
    SCALE: constexpr,
    SHARE: constexpr,
    ADVANCED: constexpr,
    REDUCTION: constexpr,
    PARTS: constexpr,
    BLOCK: constexpr,
) -> None:
    """The loss, by one program, so that sums have a fixed order; and what the backward pass needs.

    `rows` [3, count] gets the logarithm of the sum of exp(logit), (p - target) psi' of the label, and
    (p - target) (psi - psi' cos), where p is the probability of the label; `numbers` the number of samples and the
    share. A label that is not a class makes the loss NaN.
    """
    number, degrees = counts(products, inverse, labels, count, classes, ignored, SHARE, BLOCK)
    share = next_share(step, eased, degrees / number, a, b, c, SHARE, ADVANCED)
    tl.store(numbers, number)
    tl.store(numbers + 1, share)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        row, part = first + tl.arange(0, BLOCK), tl.arange(0, PARTS)
        there = row < count
        label = tl.load(labels + row, mask=there, other=0)
        kept, valid = there & (label != ignored), there & (label >= 0) & (label < classes)
        cos = cosines_of_labels(row, label, valid, products, inverse, classes)
        psi, slope = MARGIN(cos, NUMBERS)
        if SHARE > 0:
            psi, slope = cos + share * (psi - cos), 1 + share * (slope - 1)
        target = scale_of(row, there, norms, logarithm, scale, SCALE) * psi
        place = partial + (row[:, None] * parts + part[None, :]) * 3
        held = there[:, None] & (part < parts)[None, :]
        tops = tl.load(place, mask=held, other=-3.4028234e38)
        top = tl.maximum(tl.max(tops, 1), target)
        others = tl.sum(tl.load(place + 1, mask=held, other=0.0) * tl.exp(tops - top[:, None]), 1)
        plain = tl.sum(tl.load(place + 2, mask=held, other=0.0), 1) + target
        whole = others + tl.exp(target - top)
        height = tl.where(valid, tl.log(whole), float("nan"))
        own = (1 - smoothing) * (height + (top - target)) + smoothing * (height + (top - plain / classes))
        own = tl.where(kept, own, 0.0)
        pull = smoothing * (1 - 1 / classes) - others / whole
        tl.store(rows + row, height + top, mask=there)
        tl.store(rows + count + row, pull * slope, mask=there)
        tl.store(rows + 2 * count + row, pull * (psi - slope * cos), mask=there)
        if REDUCTION == 2:
            tl.store(loss + row, own, mask=there)
        else:
            total += own
    if REDUCTION == 0:
        tl.store(loss, tl.sum(total, 0) / number)
    elif REDUCTION == 1:
        tl.store(loss, tl.sum(total, 0))


@device_function
def weight_of(
    row: Block, there: Block, labels: Block, gradient: Block, numbers: Block, ignored: Block, REDUCTION: constexpr
) -> Block:
    """The derivative of the result with respect to the loss of each row; 0 where it is ignored."""
    if REDUCTION == 2:
        weight = tl.load(gradient + row, mask=there, other=0.0)
    elif REDUCTION == 0:
        weight = tl.load(gradient) / tl.load(numbers)
    else:
        weight = tl.load(gradient)
    return tl.where(tl.load(labels + row, mask=there, other=0) != ignored, weight, 0.0)


@device_function
def products_gradient_kernel(
    products: Block,
    found: Block,
    inverse: Block,
    labels: Block,
    norms: Block,
    logarithm: Block,
    rows: Block,
    numbers: Block,
    gradient: Block,
    count: Block,
    classes: Block,
    ignored: Block,
    scale: Block,
    smoothing: Block,
    threshold: Block,
    SCALE: constexpr,
    REDUCTION: constexpr,
    FILTERED: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    """The gradient of the inner products of features and weights; `found` may be `products`."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, inside = row < count, column < classes
    place, held = row.to(tl.int64)[:, None] * classes + column[None, :], there[:, None] & inside[None, :]
    label = tl.load(labels + row, mask=there, other=0)
    size = scale_of(row, there, norms, logarithm, scale, SCALE) + tl.zeros([ROWS], tl.float32)
    weight = weight_of(row, there, labels, gradient, numbers, ignored, REDUCTION)
    height = tl.load(rows + row, mask=there, other=0.0)
    pull = tl.load(rows + count + row, mask=there, other=0.0)
    over = tl.load(inverse + column, mask=inside, other=0.0)
    cos = tl.load(products + place, mask=held, other=0.0) * over[None, :]
    slope = tl.exp(cos * size[:, None] - height[:, None]) - smoothing / classes
    if FILTERED:
        slope = tl.where(cos <= threshold, slope, 0.0)
    slope = tl.where(column[None, :] == label[:, None], pull[:, None], slope)
    slope = tl.where((weight != 0)[:, None], slope * (weight * size)[:, None] * over[None, :], 0.0)
    tl.store(found + place, slope, mask=held)


@device_function
def inputs_gradient_kernel(
    of_unit: Block,
    unit: Block,
    norms: Block,
    of_features: Block,
    of_scale: Block,
    of_weight: Block,
    weight: Block,
    inverse: Block,
    found: Block,
    labels: Block,
    logarithm: Block,
    rows: Block,
    numbers: Block,
    gradient: Block,
    count: Block,
    classes: Block,
    size: Block,
    blocks: Block,
    ignored: Block,
    scale: Block,
    SCALE: constexpr,
    REDUCTION: constexpr,
    ROWS: constexpr,
    WIDTH: constexpr,
) -> None:
    """Adds the part of the norms to the gradients of features, in the first `blocks` programs, and of weights."""
    block = tl.program_id(0)
    if block < blocks:
        row = block * ROWS + tl.arange(0, ROWS)
        there = row < count
        place, held = row_tile(row, count, size, WIDTH)
        u, d = tl.load(unit + place, mask=held, other=0.0), tl.load(of_unit + place, mask=held, other=0.0)
        along, norm = tl.sum(u * d, 1), tl.load(norms + row, mask=there, other=1.0)
        by_norm = -along / norm
        if SCALE > 0:
            share = weight_of(row, there, labels, gradient, numbers, ignored, REDUCTION)
            beyond = share * tl.load(rows + 2 * count + row, mask=there, other=0.0)
            of_size = along / scale_of(row, there, norms, logarithm, scale, SCALE) + beyond
            if SCALE == 1:
                by_norm += of_size
            else:
                tl.store(of_scale + row, of_size * tl.exp(tl.load(logarithm).to(tl.float32)), mask=there)
        out = d / norm[:, None] + u * by_norm[:, None]
        tl.store(of_features + place, out.to(of_features.dtype.element_ty), mask=held)
    else:
        row = (block - blocks) * ROWS + tl.arange(0, ROWS)
        place, held = row_tile(row, classes, size, WIDTH)
        over = tl.load(inverse + row, mask=row < classes, other=0.0)
        direction = tl.load(weight + place, mask=held, other=0.0).to(tl.float32) * over[:, None]
        d = tl.load(of_weight + place, mask=held, other=0.0)
        out = d - direction * tl.sum(direction * d, 1)[:, None]
        tl.store(found + place, out.to(found.dtype.element_ty), mask=held)
