"""What a bank of decoupled filters makes of values that move: docs/robustness_bounds.md has the derivation."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dcnet.robustness.bounds.affine import with_zeros
from dcnet.robustness.bounds.bank import Bank
from dcnet.robustness.bounds.matrices import SLACK
from dcnet.robustness.bounds.signal import Signal
from dcnet.robustness.bounds.window import Window

# The norm of A U P + B U e e^T over that of U, where P takes out the direction e, and A and B are diagonal: the largest
# there is for 0 <= B <= A <= 1, and for |A|, |B| <= 1. It is 1 only where A, and B, are the same for all filters.
FADING, ANY = 2 / math.sqrt(3), math.sqrt(2)


def decoupled(signal: Signal, bank: Bank, bias: Tensor | None, window: Window) -> Signal:
    """f(w, x) + bias of every patch and every filter."""
    filters, gradients = len(bank.units), bank.gradients
    lengths = torch.linalg.vector_norm(bank.units.flatten(1), dim=1)
    patch = _patch_length(signal.linf, bank, window).clamp(max=signal.l2 * window.lengthened)
    moved = torch.minimum(_moved(signal, bank, window), gradients * lengths * patch) * SLACK
    low, high = _interval(signal, bank, bias, window)
    stretched = _stretched(signal.l2 * window.repeated, bank, window.groups)
    return Signal((filters, *window.outputs), moved, low, high, stretched)


def _moved(signal: Signal, bank: Bank, window: Window) -> Tensor:
    """How far f can move where each value of a patch moves by as much as its channel can; [out]."""
    sizes = bank.units.abs().flatten(2).sum(2) if bank.units.dim() > 2 else bank.units.abs()
    each = (sizes * window.per_filter(signal.linf, len(sizes))).sum(1)
    lengths = torch.linalg.vector_norm(bank.units.flatten(1), dim=1)
    together = lengths * _patch_length(signal.linf, bank, window)
    if bank.linear:
        return bank.gradients * each
    if bank.bend.rises and bank.steepness.fades:
        return bank.gradients * (each + together) / 2
    return bank.gradients * together


def _patch_length(values: Tensor, bank: Bank, window: Window) -> Tensor:
    """The L2 norm of patches of these values, a number a channel; [out]."""
    squares = window.per_filter(values, len(bank.units)).square().sum(1)
    return (squares * math.prod(window.kernel)).sqrt()


def _stretched(patches: float, bank: Bank, groups: int) -> Callable[[Tensor], float]:
    """How far all outputs move in L2 where all patches together move by `patches`."""

    def stretched(scale: Tensor) -> float:
        return patches * bank_norm(bank, scale, groups)

    return stretched


def bank_norm(bank: Bank, scale: Tensor, groups: int = 1) -> float:
    """The largest L2 norm of the Jacobian by one patch, where f of each filter is multiplied by a number, [out]."""
    rows = bank.gradients * scale.abs() * torch.linalg.vector_norm(bank.units.flatten(1), dim=1)
    frobenius = float(rows.square().view(groups, -1).sum(1).sqrt().max()) * SLACK
    return min(frobenius, _jacobian_norm(bank, scale.abs() * bank.bend.slope, groups))


def _jacobian_norm(bank: Bank, scale: Tensor, groups: int) -> float:
    def norm(sizes: Tensor) -> Tensor:
        weighted = bank.units.flatten(1) * (sizes * scale)[:, None]
        return torch.linalg.matrix_norm(weighted.unflatten(0, (groups, -1)), 2) * SLACK

    if bank.bend.by_angle:
        return float(torch.hypot(2 * norm(bank.steepness.chord), norm(bank.outward)).max())
    exact = bank.bend.homogeneous and bank.shared
    factor = 1.0 if exact else FADING if bank.bend.rises and bank.steepness.fades else ANY
    return factor * float(norm(bank.largest).max())


def _interval(signal: Signal, bank: Bank, bias: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
    """|f| <= |h|, which is at most its bound, and at most its slope times the longest patch there is."""
    top = bank.steepness.top
    if signal.bounded:
        low, high = with_zeros(signal, window)
        longest = (_patch_length(torch.maximum(low.abs(), high.abs()), bank, window).square() + bank.eps).sqrt()
        top = torch.minimum(top, bank.steepness.chord * longest * SLACK)
    offset = torch.zeros_like(top) if bias is None else bias
    return offset if bank.nonnegative else offset - top, offset + top
