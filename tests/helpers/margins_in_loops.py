"""The losses of the papers in plain Python, sample by sample and class by class."""

import math


def norm(row):
    return math.sqrt(sum(value * value for value in row))


def cosine(x, w):
    return sum(a * b for a, b in zip(x, w, strict=True)) / (norm(x) * norm(w))


def psi(theta, m):
    k = 0
    while theta > (k + 1) * math.pi / m:
        k += 1
    return (-1) ** k * math.cos(m * theta) - 2 * k


def stretched(c, t):
    return 2 * ((c + 1) / 2) ** t - 1


def logistic(value):
    return math.log1p(math.exp(-abs(value))) + max(value, 0)


def cross_entropy(logits, label):
    highest = max(logits)
    return highest + math.log(sum(math.exp(value - highest) for value in logits)) - logits[label]


def logits_of(margin, x, weights, label, bias, scale, state, noise):
    """s psi for the label, s eta for the others, as in each paper."""
    k = getattr(margin, "k", 1)
    cosines = [max(cosine(x, w) for w in weights[j : j + k]) for j in range(0, len(weights), k)]
    sizes = [norm(w) for w in weights[::k]]
    return [
        logit(
            margin,
            norm(x),
            sizes[j],
            c,
            cosines[label],
            j == label,
            None if bias is None else bias[j],
            scale,
            state,
            noise,
        )
        for j, c in enumerate(cosines)
    ]


def logit(margin, a, size, c, of_label, own, b, scale, state, noise):
    """One logit; `a` is the norm of the feature, `size` that of the weights, and c the cosine."""
    theta, m = math.acos(max(-1.0, min(1.0, c))), getattr(margin, "m", None)
    return {
        "softmax": lambda: a * size * c + b,
        "m-softmax": lambda: a * c,
        "a-softmax": lambda: a * (psi(theta, m) if own else c),
        "l-softmax": lambda: a * size * (psi(theta, m) if own else c),
        "am-softmax": lambda: scale * (c - m if own else c),
        "arcface": lambda: scale * (_arc(theta, m) if own else c),
        "normface": lambda: scale * c,
        "l2-softmax": lambda: scale * size * c + b,
        "sphereface-r": lambda: scale * _revived(theta, margin, own),
        "sphereface2": lambda: scale * (stretched(c, margin.t) + (-m if own else m)),
        "subcenter-arcface": lambda: scale * (_arc(theta, m) if own else c),
        "combined": lambda: scale * (psi(margin.m1 * theta + margin.m2, 1) - margin.m3 if own else c),
        "uniface": lambda: scale * (c - m if own else c),
        "adaface": lambda: scale * (_adapted(theta, margin, a, state) if own else c),
        "magface": lambda: scale * (_arc(theta, _by_magnitude(margin, a)) if own else c),
        "curricularface": lambda: scale * (_arc(theta, m) if own else _hardened(c, of_label, m, state["t"])),
        "elastic-arcface": lambda: scale * (_arc(theta, m + margin.sigma * noise) if own else c),
        "elastic-cosface": lambda: scale * (c - (m + margin.sigma * noise) if own else c),
    }[margin.name]()


def _arc(theta, m):
    return math.cos(theta + m) if theta <= math.pi - m else math.cos(theta) - m * math.sin(m)


def _revived(theta, margin, own):
    if margin.version == 1:
        return math.cos(min(margin.m * theta, math.pi)) if own else math.cos(theta)
    return math.cos(theta) if own else math.cos(theta / margin.m)


def _adapted(theta, margin, a, state):
    """AdaFace: g_angle = -m z, g_add = m z + m."""
    a = min(max(a, 0.001), 100)
    z = margin.h * (a - state["norm_mean"]) / (state["norm_deviation"] + 0.001)
    z = min(max(z, -1), 1)
    return math.cos(min(max(theta - margin.m * z, 0.001), math.pi - 0.001)) - (margin.m * z + margin.m)


def _clamped(margin, a):
    return min(max(a, margin.l_a), margin.u_a)


def _by_magnitude(margin, a):
    share = (_clamped(margin, a) - margin.l_a) / (margin.u_a - margin.l_a)
    return margin.l_margin + share * (margin.u_margin - margin.l_margin)


def _hardened(c, of_label, m, t):
    hard = c > math.cos(math.acos(max(-1.0, min(1.0, of_label))) + m)
    return c * (t + c) if hard else c


def regularizer(margin, a):
    """MagFace's lambda_g g(a)."""
    if margin.name != "magface":
        return 0.0
    a = _clamped(margin, a)
    return margin.lambda_g * (a / margin.u_a**2 + 1 / a)


def loss_weights(margin, scale):
    if margin.name == "uniface":
        return 1.0, margin.balance
    return margin.share / scale, (1 - margin.share) / scale


def loss_of(margin, features, weights, labels, bias=None, scale=None, offset=0.0, state=None, noise=None):
    total = 0.0
    for i, (x, label) in enumerate(zip(features, labels, strict=True)):
        logits = logits_of(margin, x, weights, label, bias, scale, state, noise[i] if noise else 0.0)
        total += regularizer(margin, norm(x))
        if not margin.binary:
            total += cross_entropy(logits, label)
            continue
        of_label, of_others = loss_weights(margin, scale)
        for j, value in enumerate(logits):
            weight = of_label if j == label else of_others
            total += weight * logistic(-(value + offset) if j == label else value + offset)
    return total / len(labels)


def scrambled(x):
    """A hash of 32 bits."""
    x %= 2**32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def normal_numbers(counter, count):
    """Box-Muller of hashed numbers: the radius of sample i from number i, its angle from number count + i."""
    uniform = [(scrambled(scrambled(i) + scrambled(counter)) + 0.5) / 2**32 for i in range(2 * count)]
    return [math.sqrt(-2 * math.log(uniform[i])) * math.cos(2 * math.pi * uniform[count + i]) for i in range(count)]
