"""Margins as device functions: psi(cos) of the label and its slope, for the fused head.

`numbers` are those of the margin, from `Margin.device_numbers`. See `dcnet.device_functions`.
"""

from dcnet.device_functions import Block, arcsine, at_least, at_most, constexpr, device_function, tl


@device_function
def arc_slope(cos: Block) -> Block:
    """-d theta / d cos, limited as by `dcnet.losses.margins.angle`."""
    return tl.rsqrt(at_least(1 - cos * cos, 1e-6))


@device_function
def angle(cos: Block) -> Block:
    return 1.5707963267948966 - arcsine(cos)


@device_function
def plain(cos: Block, numbers: constexpr) -> Block:
    return cos, cos * 0 + 1


@device_function
def subtracted(cos: Block, numbers: constexpr) -> Block:
    """cos - m."""
    return cos - numbers[0], cos * 0 + 1


@device_function
def added_angle(cos: Block, numbers: constexpr) -> Block:
    """cos(theta + m), or cos - m sin(m) beyond pi. The numbers are cos(m), sin(m), cos(pi - m) and m sin(m)."""
    inner = at_most(at_least(cos, -1.0), 1.0)
    sine = tl.sqrt((1 - inner) * (1 + inner))
    within = cos >= numbers[2]
    psi = tl.where(within, inner * numbers[0] - sine * numbers[1], cos - numbers[3])
    return psi, tl.where(within, (sine * numbers[0] + inner * numbers[1]) * arc_slope(cos), 1.0)


@device_function
def decreasing(theta: Block) -> Block:
    """(-1)^k cos(theta) - 2k on [k pi, (k+1) pi], and minus its slope."""
    k = tl.floor(theta * 0.3183098861837907)
    sign = 1 - 2 * (k - 2 * tl.floor(0.5 * k))
    return sign * tl.cos(theta) - 2 * k, sign * tl.sin(theta)


@device_function
def monotone_cosine(cos: Block, numbers: constexpr) -> Block:
    """(-1)^k cos(m theta) - 2k on [k pi/m, (k+1) pi/m]; a polynomial of the cosine if `POLYNOMIAL`, up to 4."""
    M: constexpr = numbers[0]
    POLYNOMIAL: constexpr = numbers[1]
    inner = at_most(at_least(cos, -1.0), 1.0)
    if POLYNOMIAL > 0:
        # Chebyshev polynomials of the first and second kind; the slope of the first is m times the second.
        before, wave = inner * 0 + 1, inner
        below, rise = inner * 0, inner * 0 + 1
        for _ in tl.static_range(1, POLYNOMIAL):
            before, wave = wave, 2 * inner * wave - before
            below, rise = rise, 2 * inner * rise - below
        k = inner * 0
        for i in tl.static_range(1, POLYNOMIAL):
            k += tl.where(inner < numbers[1 + i], 1.0, 0.0)
        sign = 1 - 2 * (k - 2 * tl.floor(0.5 * k))
        psi, slope = sign * wave - 2 * k, sign * M * rise
    else:
        psi, fall = decreasing(M * angle(inner))
        slope = M * fall * arc_slope(inner)
    return psi, tl.where((cos >= -1) & (cos <= 1), slope, 0.0)


@device_function
def combined(cos: Block, numbers: constexpr) -> Block:
    """psi(m1 theta + m2) - m3 with the decreasing cosine."""
    psi, fall = decreasing(numbers[0] * angle(cos) + numbers[1])
    return psi - numbers[2], numbers[0] * fall * arc_slope(cos)


@device_function
def stopped(cos: Block, numbers: constexpr) -> Block:
    """cos(min(m theta, pi)), with slope 1 if the second number is 1."""
    theta = numbers[0] * angle(cos)
    psi = tl.cos(at_most(theta, 3.141592653589793))
    if numbers[1] == 1:
        slope = cos * 0 + 1
    else:
        slope = tl.where(theta <= 3.141592653589793, numbers[0] * tl.sin(theta) * arc_slope(cos), 0.0)
    return psi, slope
