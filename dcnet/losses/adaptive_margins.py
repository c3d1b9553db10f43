"""Adaptive margins, which depend on the batch: on the norms of features, running statistics, or random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dcnet.checks import check_number
from dcnet.clamp import between
from dcnet.losses.cosine_margins import AMSoftmax, ArcFace, added_angle
from dcnet.losses.margins import Batch, Margin, State, angle, limited, register

# AdaFace keeps theta + m this far from 0 and pi, and adds it to the standard deviation.
GAP = 1e-3
# The limits of the norms that AdaFace uses.
LEAST_NORM, MOST_NORM = 1e-3, 100.0
# The largest l_a and u_a of MagFace; float32 holds their squares.
LARGEST_NORM = 1e6


def moved(old: Tensor, found: Tensor, momentum: float) -> Tensor:
    """The running mean after a batch; a batch without a finite value does not change it."""
    found = found.to(old.dtype)
    return torch.where(found.isfinite(), old + momentum * (found - old), old)


@register
@dataclass(frozen=True)
class AdaFace(Margin):
    """s (cos(theta_y - m z) - m z - m), z = h (||x|| - mean) / deviation within [-1, 1] (AdaFace, 2022).

    The norm stands for the quality of an image: hard samples count more if the norm is large, and less if it is small.
    Mean and standard deviation of the norms are running means over batches. z has no gradient.
    """

    name: ClassVar[str] = "adaface"
    about: ClassVar[str] = "s (cos(theta_y - m z) - m z - m), s cos(theta_j), z = h (||x|| - mean) / deviation"
    uses_norms: ClassVar[bool] = True
    scale: ClassVar[float | None] = 64.0
    m: float = limited(0.4, least=0, below=math.pi / 2)
    h: float = limited(0.333, above=0)
    momentum: float = limited(0.01, least=0, most=1)

    def target(self, cos: Tensor) -> Tensor:
        return self._target(cos, torch.zeros_like(cos))

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        norms = batch.norms.detach().clamp(LEAST_NORM, MOST_NORM)
        z = (norms - batch.state["norm_mean"]) / (batch.state["norm_deviation"] + GAP)
        return self._target(cos, (self.h * z).clamp(-1, 1).to(cos.dtype))

    def _target(self, cos: Tensor, z: Tensor) -> Tensor:
        return torch.cos(between(angle(cos) - self.m * z, GAP, math.pi - GAP)) - self.m * (1 + z)

    def first_state(self) -> State:
        return {"norm_mean": torch.tensor(20.0, device="cpu"), "norm_deviation": torch.tensor(100.0, device="cpu")}

    def next_state(self, batch: Batch) -> State:
        norms, count = batch.norms.clamp(LEAST_NORM, MOST_NORM), batch.kept.sum()
        mean = norms.masked_fill(~batch.kept, 0.0).sum() / count
        # The deviation of fewer than two samples is nan, which leaves the running mean unchanged.
        variance = (norms - mean).square().masked_fill(~batch.kept, 0.0).sum() / (count - 1).clamp(min=0)
        found = {"norm_mean": mean, "norm_deviation": variance.sqrt()}
        return {name: moved(batch.state[name], value, self.momentum) for name, value in found.items()}

    def of_one_batch(self) -> AdaFace:
        return replace(self, momentum=1.0)


@register
@dataclass(frozen=True)
class MagFace(Margin):
    """ArcFace whose m grows with a = ||x|| from l_margin at l_a to u_margin at u_a (MagFace, 2021).

    The loss has the regularizer lambda_g g(a), g(a) = a / u_a^2 + 1 / a, which rewards large norms: a norm is then a
    measure of quality. a is clamped to [l_a, u_a].
    """

    name: ClassVar[str] = "magface"
    about: ClassVar[str] = "s cos(theta_y + m(||x||)), s cos(theta_j), m linear in ||x||"
    uses_norms: ClassVar[bool] = True
    scale: ClassVar[float | None] = 64.0
    l_a: float = limited(10.0, above=0, below=LARGEST_NORM)
    u_a: float = 110.0
    l_margin: float = limited(0.45, least=0, below=math.pi / 2)
    u_margin: float = 0.8
    lambda_g: float = limited(35.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"u_a of {self.name}", self.u_a, above=self.l_a, most=LARGEST_NORM)
        check_number(f"u_margin of {self.name}", self.u_margin, least=self.l_margin, below=math.pi / 2)

    def target(self, cos: Tensor) -> Tensor:
        return added_angle(cos, torch.full_like(cos, (self.l_margin + self.u_margin) / 2))

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        slope = (self.u_margin - self.l_margin) / (self.u_a - self.l_a)
        return added_angle(cos, self.l_margin + slope * (between(batch.norms, self.l_a, self.u_a) - self.l_a))

    def penalty(self, norms: Tensor) -> Tensor:
        a = between(norms, self.l_a, self.u_a)
        return self.lambda_g * (a / self.u_a**2 + 1 / a)


@register
@dataclass(frozen=True)
class CurricularFace(ArcFace):
    """ArcFace, and s cos(theta_j) (t + cos(theta_j)) where cos(theta_j) > cos(theta_y + m) (CurricularFace, 2020).

    t is the running mean of cos(theta_y): hard classes count little at first, and more as training proceeds.
    """

    name: ClassVar[str] = "curricularface"
    about: ClassVar[str] = "s cos(theta_y + m), s cos(theta_j) or, if hard, s cos(theta_j) (t + cos(theta_j))"
    momentum: float = limited(0.01, least=0, most=1)

    def others_in(self, cos: Tensor, batch: Batch) -> Tensor:
        # Without a label, no class is hard.
        hard = (cos.detach() > torch.cos(angle(batch.own) + self.m)[:, None]) & batch.kept[:, None]
        return torch.where(hard, cos * (batch.state["t"].to(cos.dtype) + cos), cos)

    def first_state(self) -> State:
        return {"t": torch.tensor(0.0, device="cpu")}

    def next_state(self, batch: Batch) -> State:
        mean = batch.own.masked_fill(~batch.kept, 0.0).sum() / batch.kept.sum()
        return {"t": moved(batch.state["t"], mean, self.momentum)}

    def of_one_batch(self) -> CurricularFace:
        return replace(self, momentum=1.0)


class _Elastic(Margin):
    """A margin drawn from N(m, sigma) for each sample, by a counter: a resumed run draws the same margins."""

    m: float
    sigma: float

    def drawn(self, cos: Tensor, batch: Batch) -> Tensor:
        """m for each sample; without noise in evaluation."""
        noise = normal_numbers(batch.state["draws"], len(cos)).to(cos.dtype)
        return self.m + (self.sigma if batch.training else 0.0) * noise

    def first_state(self) -> State:
        # From torch's generator, so that the seed of a run determines the margins.
        return {"draws": torch.randint(2**31, (), device="cpu")}

    def next_state(self, batch: Batch) -> State:
        return {"draws": batch.state["draws"] + 1}


@register
@dataclass(frozen=True)
class ElasticArcFace(_Elastic, ArcFace):
    """ArcFace with m drawn from N(m, sigma) for each sample of each batch (ElasticFace-Arc, 2022)."""

    name: ClassVar[str] = "elastic-arcface"
    aliases: ClassVar[tuple[str, ...]] = ("elasticface", "elasticface-arc")
    about: ClassVar[str] = "s cos(theta_y + m'), s cos(theta_j), m' drawn from N(m, sigma)"
    sigma: float = limited(0.05, least=0)

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        return added_angle(cos, self.drawn(cos, batch))


@register
@dataclass(frozen=True)
class ElasticCosFace(_Elastic, AMSoftmax):
    """CosFace with m drawn from N(m, sigma) for each sample of each batch (ElasticFace-Cos, 2022)."""

    name: ClassVar[str] = "elastic-cosface"
    aliases: ClassVar[tuple[str, ...]] = ("elasticface-cos",)
    about: ClassVar[str] = "s (cos(theta_y) - m'), s cos(theta_j), m' drawn from N(m, sigma)"
    scale: ClassVar[float | None] = 64.0
    sigma: float = limited(0.05, least=0)

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        return cos - self.drawn(cos, batch)


def normal_numbers(counter: Tensor, count: int) -> Tensor:
    """Standard normal numbers [count] that depend on an integer [] alone (Box-Muller), computed on its device."""
    rows = torch.arange(2 * count, device=counter.device)
    uniform = (_scrambled(_scrambled(rows) + _scrambled(counter)).double() + 0.5) / 2**32
    radius, turn = uniform.chunk(2)
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * turn)


def _scrambled(x: Tensor) -> Tensor:
    """A hash of the low 32 bits, a bijection of them; int64 holds all products modulo 2^64."""
    low = 2**32 - 1
    x = x & low
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & low
    return x ^ (x >> 16)
