"""Annealing of margins: training starts with a small share of the margin, since it would diverge with the full one.

The module that holds the share of a margin also holds its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dcnet.checks import check_number
from dcnet.losses.margins import Batch, Margin, angle


@dataclass(frozen=True)
class Annealing:
    """SphereFace's schedule: the target's logit is (lambda cos + psi) / (1 + lambda).

    lambda is max(floor, start / (1 + rate * step)), so that the share of the margin psi is 1 / (1 + lambda). A margin
    on the other classes is annealed in the same way. The defaults are SphereFace's.

    Attributes:
        start: lambda at the first step.
        rate: how fast lambda decreases.
        floor: the smallest lambda; 5 means that a sixth of the margin is used in the end.
    """

    start: float = 1000.0
    rate: float = 0.12
    floor: float = 5.0

    def __post_init__(self) -> None:
        for name in ("start", "rate", "floor"):
            check_number(f"{name} of an annealing", getattr(self, name), least=0)

    @property
    def first_share(self) -> float:
        """The share of psi at the first step."""
        return 1 / (1 + max(self.floor, self.start))

    def share(self, step: Tensor) -> Tensor:
        """The share of psi at a step, from 0 to 1."""
        penalty = torch.clamp(self.start / (1 + self.rate * step.double()), min=self.floor)
        return (1 / (1 + penalty)).float()


@dataclass(frozen=True)
class Automatic:
    """The share of the margin grows as the target angle decreases; it never shrinks.

    A margin of m requires m * theta_y to be below the angles to other classes, which are near 90 degrees for random
    directions. The target share is 0 at a mean target angle of 90 degrees and `most` at `ready`, linear in between.
    Each step moves the share by `pace` times the difference.

    Attributes:
        ready: the mean target angle in degrees at which the whole margin is used.
        pace: the fraction of the remaining difference that one step closes.
        most: the largest share.
    """

    ready: float = 45.0
    pace: float = 0.01
    most: float = 1.0

    def __post_init__(self) -> None:
        check_number("ready", self.ready, above=0, below=90)
        check_number("pace", self.pace, above=0, most=1)
        check_number("most", self.most, above=0, most=1)

    @property
    def first_share(self) -> float:
        """The share of psi at the first step: 0, since the angle is not known yet."""
        return 0.0

    def next_share(self, share: Tensor, degrees: Tensor) -> Tensor:
        """The share after a batch with this mean target angle, computed on the device without synchronization."""
        allowed = ((90 - degrees) / (90 - self.ready)).clamp(0, 1) * self.most
        # A batch without a finite angle keeps the share, which would stay nan otherwise.
        return share + self.pace * (allowed - share).clamp(min=0).nan_to_num(nan=0.0)


AnyAnnealing = Annealing | Automatic
BY_MARGIN = "by margin"


def apply_share(cos: Tensor, full: Tensor, share: Tensor | float | None) -> Tensor:
    """cos + share * (full - cos), where `full` is the cosine with the full margin; None means a share of 1.

    It costs nothing if the margin returns the cosine itself, since there may be a million classes.
    """
    if share is None or full is cos:
        return full
    # In place, to save memory: there may be a million classes.
    return (full - cos).mul_(share).add_(cos)


def as_annealing(given: AnyAnnealing | str | None, needed: bool) -> AnyAnnealing | None:
    """The annealing that an argument of a head means; "by margin" is `Annealing()` if the margin needs it."""
    if given == BY_MARGIN:
        return Annealing() if needed else None
    if given == "auto":
        return Automatic()
    if given is not None and not isinstance(given, Annealing | Automatic):
        raise ValueError(f"annealing must be an Annealing, 'auto' or None, not {given!r}")
    return given


class AnnealedMargin(nn.Module):
    """A margin and its state, its annealing, and the current share of the margin.

    Each number of the margin's state is a buffer.

    Args:
        margin: the margin.
        annealing: as in `MarginSoftmax`.
    """

    step: Tensor
    eased_in: Tensor

    def __init__(self, margin: Margin, annealing: AnyAnnealing | str | None):
        super().__init__()
        self.margin, self.annealing = margin, as_annealing(annealing, margin.annealed)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("eased_in", torch.tensor(self.first_share, dtype=torch.float32))
        first = margin.first_state()
        self.state_names = tuple(first)
        for name, value in first.items():
            self.register_buffer(name, torch.zeros((), dtype=value.dtype))

    @property
    def first_share(self) -> float:
        """The share of the margin at the first step; 1 without annealing."""
        return 1.0 if self.annealing is None else self.annealing.first_share

    def reset_parameters(self) -> None:
        """Restarts annealing at the first step, and the state of the margin."""
        self.step.zero_()
        self.eased_in.fill_(self.first_share)
        for name, value in self.margin.first_state().items():
            self.get_buffer(name).copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AnnealedMargin:
        """Moves and casts as torch does, but keeps buffers in float32: half precision would lose their small steps."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, value in before.items():
            if (cast := self.get_buffer(name)).dtype != value.dtype:
                setattr(self, name, value.to(cast.device))
        return self

    @torch.no_grad()
    def _next_share(self, cos: Tensor, kept: Tensor) -> Tensor | None:
        """The share of the margin for this batch; training advances it.

        Args:
            cos: the cosines [N] with the weights of the labels.
            kept: bool [N], False for ignored samples.
        """
        if self.annealing is None:
            return None
        if self.training and not recomputing():
            if isinstance(self.annealing, Automatic):
                degrees = torch.rad2deg(angle(cos)).masked_fill(~kept, 0.0).sum() / kept.sum()
                self.eased_in.copy_(self.annealing.next_share(self.eased_in, degrees.to(self.eased_in)))
            else:
                self.eased_in.copy_(self.annealing.share(self.step))
            self.step.add_(1)
        elif not self.training and not isinstance(self.annealing, Automatic):
            self.eased_in.copy_(self.annealing.share(self.step))
        # A copy, since the next batch may change it before this one is differentiated.
        return self.eased_in.to(cos.dtype).clone()

    @torch.no_grad()
    def _next_batch(self, own: Tensor, norms: Tensor, kept: Tensor) -> Batch:
        """What the margin depends on besides the cosines; training advances the state of the margin.

        Args:
            own: the cosines [N] with the weights of the labels.
            norms: the norms [N] of the features.
            kept: bool [N], False for ignored samples.
        """
        state = {name: self.get_buffer(name) for name in self.state_names}
        batch = Batch(own.detach(), norms, kept, state, self.training)
        if self.training and not recomputing():
            for name, value in self.margin.next_state(batch).items():
                self.get_buffer(name).copy_(value)
        # Copies, since the next batch may change them before this one is differentiated.
        return replace(batch, state={name: value.clone() for name, value in batch.state.items()})

    def _target(self, cos: Tensor, share: Tensor | None, batch: Batch) -> Tensor:
        """(lambda cos + psi) / (1 + lambda) for the class of the label; the share is 1 / (1 + lambda)."""
        return apply_share(cos, self.margin.target_in(cos, batch), share)

    def _others(self, cos: Tensor, share: Tensor | None, batch: Batch) -> Tensor:
        """The same for all other classes, with eta."""
        return apply_share(cos, self.margin.others_in(cos, batch), share)


def recomputing() -> bool:
    """True within a backward pass, where torch.utils.checkpoint recomputes a batch that was counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
