"""Heads with a margin: their logits, which have none."""

import math

import torch

from dcnet.losses import MarginSoftmax
from dcnet.losses.cosine import EPS
from dcnet.norms import filter_norm
from dcnet.robustness.bounds.affine import affine
from dcnet.robustness.bounds.angles import Bend
from dcnet.robustness.bounds.bank import Bank
from dcnet.robustness.bounds.decoupled import decoupled
from dcnet.robustness.bounds.magnitudes import Steepness
from dcnet.robustness.bounds.signal import Signal
from dcnet.robustness.bounds.window import Window


def head_logits(head: MarginSoftmax, signal: Signal) -> Signal:
    """s cos(theta), or ||x|| cos(theta), which is linear; times ||w|| where the margin leaves filters their norm."""
    if type(head) is not MarginSoftmax:
        raise ValueError("shares its classes with other processes, or computes something of its own")
    if signal.shape != (head.in_features,):
        raise ValueError(f"takes {head.in_features} features, and gets {list(signal.shape)} of an image")
    weight = head.weight.detach().double()
    norms = filter_norm(weight, EPS)
    units, sizes = weight / norms[:, None], torch.ones_like(norms) if head.margin.unit_weights else norms
    bias = None if head.bias is None else head.bias.detach().double()
    if head.scale.is_norm:
        return affine(signal, units * sizes[:, None], bias, Window())
    sizes = sizes * head.scale(norms).detach().double()
    steep = Steepness(sizes / math.sqrt(EPS), torch.zeros_like(sizes), sizes, True)
    cosine = Bend(torch.ones((), dtype=torch.float64), rises=True, homogeneous=True)
    return decoupled(signal, Bank(units, steep, cosine, True, False, False, EPS), bias, Window())
