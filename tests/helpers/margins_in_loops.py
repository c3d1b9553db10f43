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


def logits_of(margin, x, weights, label, bias, scale):
    """s psi for the label, s eta for the others, as in each paper."""
    return [logit(margin, x, w, j == label, None if bias is None else bias[j], scale) for j, w in enumerate(weights)]


def logit(margin, x, w, own, b, scale):
    c = cosine(x, w)
    theta = math.acos(max(-1.0, min(1.0, c)))
    return {
        "softmax": lambda: norm(x) * norm(w) * c + b,
        "m-softmax": lambda: norm(x) * c,
        "a-softmax": lambda: norm(x) * (psi(theta, margin.m) if own else c),
        "l-softmax": lambda: norm(x) * norm(w) * (psi(theta, margin.m) if own else c),
        "am-softmax": lambda: scale * (c - margin.m if own else c),
        "arcface": lambda: scale * (_arc(theta, margin.m) if own else c),
        "normface": lambda: scale * c,
        "l2-softmax": lambda: scale * norm(w) * c + b,
        "sphereface-r": lambda: scale * _revived(theta, margin, own),
        "sphereface2": lambda: scale * (stretched(c, margin.t) + (-margin.m if own else margin.m)),
    }[margin.name]()


def _arc(theta, m):
    return math.cos(theta + m) if theta <= math.pi - m else math.cos(theta) - m * math.sin(m)


def _revived(theta, margin, own):
    if margin.version == 1:
        return math.cos(min(margin.m * theta, math.pi)) if own else math.cos(theta)
    return math.cos(theta) if own else math.cos(theta / margin.m)


def loss_of(margin, features, weights, labels, bias=None, scale=None, offset=0.0):
    total = 0.0
    for x, label in zip(features, labels, strict=True):
        logits = logits_of(margin, x, weights, label, bias, scale)
        if margin.name != "sphereface2":
            total += cross_entropy(logits, label)
            continue
        for j, value in enumerate(logits):
            share = margin.share if j == label else 1 - margin.share
            total += share / scale * logistic(-(value + offset) if j == label else value + offset)
    return total / len(labels)
