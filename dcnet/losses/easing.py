"""What a head keeps of its annealing: how many batches it has seen, and how much of the margin they let in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dcnet.losses.annealing import Automatic, Easing, as_easing, let_in
from dcnet.losses.margin import Margin, angle


class Eased(nn.Module):
    """A margin that is let in by and by.

    Args:
        margin: what is let in.
        annealing: as in `MarginSoftmax`.
    """

    step: Tensor
    eased_in: Tensor

    def __init__(self, margin: Margin, annealing: Easing | str | None):
        super().__init__()
        self.margin, self.annealing = margin, as_easing(annealing, margin.eased)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("eased_in", torch.tensor(self.first_share, dtype=torch.float32))

    @property
    def first_share(self) -> float:
        """How much of the margin is used at first; all of it where nothing is annealed."""
        return 1.0 if self.annealing is None else self.annealing.first_weight

    def reset_parameters(self) -> None:
        """From the first batch on again."""
        self.step.zero_()
        self.eased_in.fill_(self.first_share)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Eased:
        """Moves and casts as torch does, but keeps the share, whose small steps half precision would lose."""
        before = self.eased_in
        super()._apply(fn, recurse)
        if self.eased_in.dtype != before.dtype:
            self.eased_in = before.to(self.eased_in.device)
        return self

    @torch.no_grad()
    def _next_share(self, cos: Tensor, kept: Tensor) -> Tensor | None:
        """How much of the margin counts in this batch; in training it moves on.

        Args:
            cos: the cosines [N] with the weights of the labels.
            kept: bool [N], False for samples that are ignored.
        """
        if self.annealing is None:
            return None
        if self.training and not _recomputing():
            if isinstance(self.annealing, Automatic):
                degrees = torch.rad2deg(angle(cos)).masked_fill(~kept, 0.0).sum() / kept.sum()
                self.eased_in.copy_(self.annealing.next_weight(self.eased_in, degrees.to(self.eased_in)))
            else:
                self.eased_in.copy_(self.annealing.weight(self.step))
            self.step.add_(1)
        elif not self.training and not isinstance(self.annealing, Automatic):
            self.eased_in.copy_(self.annealing.weight(self.step))
        # A copy, since the next batch changes it before the gradients of this one may be asked for.
        return self.eased_in.to(cos.dtype).clone()

    def _target(self, cos: Tensor, share: Tensor | None) -> Tensor:
        """(lambda cos + psi) / (1 + lambda) of the label's class, of which 1 / (1 + lambda) is the share."""
        return let_in(cos, self.margin.target(cos), share)

    def _others(self, cos: Tensor, share: Tensor | None) -> Tensor:
        """The same of all other classes, by eta."""
        return let_in(cos, self.margin.others(cos), share)


def _recomputing() -> bool:
    """True within a backward pass, where torch.utils.checkpoint computes a batch again that was counted before.

    The share is then still that of the last batch.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
