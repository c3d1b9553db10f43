"""The paper's equations in plain loops over Python floats: slow, obvious, and independent of the library."""

import itertools
import math

import torch
from torch import Tensor

# --- magnitudes, Eq. 4 to 10: n is the norm, rho the radius ---


def magnitude(name: str, n: float, rho: float = 1.0, alpha: float = 1.0, beta: float | None = None) -> float:
    if name == "sphere":
        return alpha
    if name == "ball":
        return alpha * min(n, rho) / rho
    if name == "tanh":
        return alpha * math.tanh(n / rho)
    if name == "linear":
        return alpha * n
    if name == "seg":
        beta = 0.5 if beta is None else beta
        return alpha * n if n <= rho else beta * n + alpha * rho - beta * rho
    if name == "log":
        return alpha * math.log(1 + n)
    if name == "mix":
        beta = 1.0 if beta is None else beta
        return alpha * n + beta * math.log(1 + n)
    if name == "sharp":  # q = 0.1, p = 2
        return (n / (n + 0.1)) ** 2
    raise KeyError(name)


# --- angles, Eq. 11 to 14: functions of theta ---


def angle(name: str, theta: float, k: float = 0.3, p: float = 2.0) -> float:
    cos = math.cos(theta)
    if name == "linear":
        return -2 / math.pi * theta + 1
    if name == "cos":
        return cos
    if name == "sigmoid":
        left = (1 + math.exp(-math.pi / (2 * k))) / (1 - math.exp(-math.pi / (2 * k)))
        shifted = math.exp(theta / k - math.pi / (2 * k))
        return left * (1 - shifted) / (1 + shifted)
    if name == "sqcos":
        return math.copysign(1, cos) * cos**2
    if name == "relucos":
        return max(0.0, cos)
    if name == "power":
        return math.copysign(1, cos) * abs(cos) ** p
    if name == "spline":  # its initial curve is the cosine
        return cos
    raise KeyError(name)


# --- weightings, Section 3.5: w_norm and x_norm are ||w|| and ||x||; mean multiplies rho only in functions of ||x|| ---


def weighted(
    weighting: str, name: str, w_norm: float, x_norm: float, rho: float, mean: float, alpha: float, beta: float | None
) -> float:
    def h(n: float, radius: float) -> float:
        return magnitude(name, n, radius, alpha, beta)

    if weighting == "unweighted":
        return h(x_norm, rho * mean)
    if weighting == "linear":
        return w_norm * h(x_norm, rho * mean)
    if weighting == "joint":
        return h(w_norm * x_norm, rho * mean)
    if weighting == "product":
        return h(w_norm, rho) * h(x_norm, rho * mean) / alpha
    raise KeyError(weighting)


def operator(
    names: tuple[str, str, str],
    w: list[float],
    x: list[float],
    rho: float = 1.0,
    mean: float = 1.0,
    alpha: float = 1.0,
    beta: float | None = None,
    k: float = 0.3,
    p: float = 2.0,
    eps: float = 1e-4,
) -> float:
    """f(w, x) of one filter and one patch, Eq. 3."""
    h_name, g_name, weighting = names
    w_norm = math.sqrt(sum(value * value for value in w) + eps)
    x_norm = math.sqrt(sum(value * value for value in x) + eps)
    cos = sum(a * b for a, b in zip(w, x, strict=True)) / (w_norm * x_norm)
    theta = math.acos(max(-1.0, min(1.0, cos)))
    return weighted(weighting, h_name, w_norm, x_norm, rho, mean, alpha, beta) * angle(g_name, theta, k, p)


# --- patches: every window of the padded input, as lists ---


def patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: int,
    padding: list[tuple[int, int]],
    dilation: int,
    mode: str,
    groups: int,
) -> dict[tuple[int, ...], list[float]]:
    """The values of every patch, by (sample, group, *position), in the order of a filter's own values."""
    found = {}
    sizes = [
        (size + sum(ends) - dilation * (k - 1) - 1) // stride + 1
        for size, ends, k in zip(x.shape[2:], padding, kernel, strict=True)
    ]
    per_group = x.shape[1] // groups
    for sample, group in itertools.product(range(x.shape[0]), range(groups)):
        for position in itertools.product(*map(range, sizes)):
            values = []
            for channel in range(group * per_group, (group + 1) * per_group):
                for offset in itertools.product(*map(range, kernel)):
                    where = [
                        p * stride + o * dilation - ends[0]
                        for p, o, ends in zip(position, offset, padding, strict=True)
                    ]
                    values.append(pixel(x[sample, channel], where, mode))
            found[(sample, group, *position)] = values
    return found


def pixel(image: Tensor, where: list[int], mode: str) -> float:
    """The value at a position that may be outside of the image."""
    index = []
    for i, size in zip(where, image.shape, strict=True):
        if 0 <= i < size:
            index.append(i)
        elif mode == "zeros":
            return 0.0
        elif mode == "replicate":
            index.append(min(max(i, 0), size - 1))
        elif mode == "circular":
            index.append(i % size)
        elif mode == "reflect":
            index.append(-i if i < 0 else 2 * (size - 1) - i)
        else:
            raise KeyError(mode)
    return float(image[tuple(index)])


def convolution(
    names: tuple[str, str, str],
    x: Tensor,
    weight: Tensor,
    rho: list[float],
    stride: int = 1,
    padding: list[tuple[int, int]] | None = None,
    dilation: int = 1,
    groups: int = 1,
    mode: str = "zeros",
    relative: bool = False,
    eps: float = 1e-4,
    **constants: float,
) -> Tensor:
    """The decoupled convolution of a batch, rho per output channel; a relative rho is multiplied by the mean ||x||."""
    kernel = tuple(weight.shape[2:])
    found = patches(x, kernel, stride, padding or [(0, 0)] * len(kernel), dilation, mode, groups)
    norms = [math.sqrt(sum(value * value for value in patch) + eps) for patch in found.values()]
    mean = sum(norms) / len(norms) if relative else 1.0
    positions = [max(key[i] for key in found) + 1 for i in range(2, 2 + len(kernel))]
    out = torch.zeros(x.shape[0], weight.shape[0], *positions, dtype=torch.float64)
    filters = weight.flatten(1).tolist()
    for (sample, group, *position), patch in found.items():
        for channel in range(weight.shape[0]):
            if channel // (weight.shape[0] // groups) == group:
                value = operator(names, filters[channel], patch, rho[channel], mean, eps=eps, **constants)
                out[(sample, channel, *position)] = value
    return out


# --- attention: keys are filters, queries are patches ---


def attention(
    names: tuple[str, str, str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    rho: list[float] | None = None,
    **constants: float,
) -> Tensor:
    """softmax over j of scale * f(k_j, q_i) + mask, times v_j, for [N, heads, length, features]; rho is per head.

    Query heads that follow each other share a head of the key. A mask holds numbers, -inf to exclude a key. A query
    without any key gets zeros.
    """
    samples, heads, length, _ = query.shape
    out = torch.zeros(samples, heads, length, value.shape[-1], dtype=torch.float64)
    for sample, head, i in itertools.product(range(samples), range(heads), range(length)):
        shared = head // (heads // key.shape[1])
        keys, values = key[sample, shared].tolist(), value[sample, shared].tolist()
        radius = 1.0 if rho is None else rho[head]
        exponentials = []
        for j, k in enumerate(keys):
            added = 0.0 if mask is None else float(mask[sample, head, i, j])
            score = scale * operator(names, k, query[sample, head, i].tolist(), radius, **constants) + added
            exponentials.append(0.0 if causal and j > i else math.exp(score))
        total = sum(exponentials)
        for j, exponential in enumerate(exponentials):
            weight = exponential / total if total else 0.0
            out[sample, head, i] += weight * torch.tensor(values[j], dtype=torch.float64)
    return out
