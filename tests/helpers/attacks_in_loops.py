"""Attacks in plain loops, one image and one pixel at a time, with gradients by finite differences."""

import math

import torch

BITS = (1 << 64) - 1


def draw(seed, row, pixel, pixels):
    """A number in (0, 1) from the upper 23 bits of splitmix64."""
    bits = ((row * pixels + pixel + 1) * 0x9E3779B97F4A7C15 + seed) & BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & BITS
    return (((bits ^ (bits >> 31)) >> 41) + 0.5) / 2**23


def cross_entropy(logits, label):
    largest = max(logits)
    return largest + math.log(sum(math.exp(z - largest) for z in logits)) - logits[label]


def margin(logits, label):
    return max(z for other, z in enumerate(logits) if other != label) - logits[label]


class LoopAttack:
    """x <- project(x + step * steepest(gradient)), with or without momentum."""

    def __init__(self, model, norm, epsilon, step, steps, momentum=0.0, loss=cross_entropy, targeted=False):
        self.model, self.norm, self.epsilon, self.step, self.steps = model, norm, epsilon, step, steps
        self.momentum, self.loss, self.sign = momentum, loss, -1 if targeted else 1

    @torch.no_grad()
    def logits(self, pixels):
        return self.model(torch.tensor(pixels, dtype=torch.float64).view(1, *self.shape))[0].tolist()

    def gradient(self, pixels, label, h=1e-6):
        found = []
        for place in range(len(pixels)):
            up = [value + (h if at == place else 0) for at, value in enumerate(pixels)]
            down = [value - (h if at == place else 0) for at, value in enumerate(pixels)]
            change = self.loss(self.logits(up), label) - self.loss(self.logits(down), label)
            found.append(self.sign * change / (2 * h))
        return found

    def steepest(self, gradient):
        if self.norm == "linf":
            return [math.copysign(1, g) if g else 0.0 for g in gradient]
        size = math.sqrt(sum(g * g for g in gradient))
        return [g / size for g in gradient]

    def projected(self, delta):
        if self.norm == "linf":
            return [min(max(d, -self.epsilon), self.epsilon) for d in delta]
        size = math.sqrt(sum(d * d for d in delta))
        return [d * min(1, self.epsilon / size) for d in delta] if size else delta

    def image(self, x, label, start=None):
        self.shape = x.shape
        clean = x.flatten().tolist()
        pixels = clean if start is None else start.flatten().tolist()
        velocity = [0.0] * len(clean)
        for _ in range(self.steps):
            gradient = self.gradient(pixels, label)
            mean = sum(abs(g) for g in gradient) / len(gradient)
            velocity = [self.momentum * v + g / mean for v, g in zip(velocity, gradient, strict=True)]
            moved = [p + self.step * s for p, s in zip(pixels, self.steepest(velocity), strict=True)]
            delta = self.projected([m - c for m, c in zip(moved, clean, strict=True)])
            pixels = [min(max(c + d, 0.0), 1.0) for c, d in zip(clean, delta, strict=True)]
        return torch.tensor(pixels, dtype=torch.float64).view(x.shape)

    def images(self, x, labels, starts=None):
        return torch.stack(
            [self.image(x[i], int(labels[i]), None if starts is None else starts[i]) for i in range(len(x))]
        )
