"""Chance that depends on a seed, an image and a pixel alone: the same in any batch, in any order, on any device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The constants of splitmix64, as the signed numbers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
# A half more than this many bits is still exact in float32, so that neither 0 nor 1 is ever drawn.
BITS = 23


def uniform(seed: int, rows: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Numbers float32 [len(rows), *shape] between 0 and 1, neither of them; `rows` int64 number the images."""
    count = math.prod(shape)
    places = rows[:, None] * count + torch.arange(1, count + 1, device=rows.device)
    kept = _shifted(_scrambled(places * GOLDEN + seed), 64 - BITS)
    return ((kept.float() + 0.5) / (1 << BITS)).view(len(rows), *shape)


def normal(seed: int, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers float32 [len(rows), *shape] of mean 0 and deviation 1."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(seed, rows, shape) - 1)


def _scrambled(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * FIRST
    bits = (bits ^ _shifted(bits, 27)) * SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in; torch would repeat the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def as_seed(given: int | torch.Generator) -> int:
    """The seed itself, or the next number of a generator."""
    if isinstance(given, torch.Generator):
        return int(torch.randint(1 << 62, (), generator=given, device=given.device))
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1 or a torch.Generator, not {given!r}")
    return given
