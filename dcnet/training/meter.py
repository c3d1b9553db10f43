"""Sums over steps that stay on the device, so that nobody waits for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("totals", "bad_step", "step")
# Adds up what several processes have.
Join = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reading:
    """Means over the images since the last reset; `bad_step` is the first whose loss was not finite, or None."""

    loss: float
    accuracy: float
    bad_step: int | None


class Meter:
    """Counts images, correct ones and losses, and remembers the first step whose loss was not finite."""

    def __init__(self, device: torch.device, join: Join | None = None, is_first: bool = True):
        self.join, self.is_first = join, is_first
        # Losses, correct ones and images.
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        # As torch's fused optimizers read it: where it is 1, they leave everything as it is.
        self.found_bad = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, correct: Tensor, images: int, gradient: Tensor | None = None) -> None:
        """Takes one step into account; from the first bad step on, nothing is changed any more by the optimizer.

        A step is bad if its loss is not finite, or the largest of its gradients.
        """
        loss = loss.detach()
        bad = ~loss.isfinite()
        if gradient is not None:
            bad = bad | ~gradient.isfinite()
        if self.join is not None:
            bad = self.join(bad.float()) > 0
        self.bad_step.copy_(torch.where(bad & (self.bad_step < 0), self.step, self.bad_step))
        self.found_bad.copy_(self.bad_step >= 0)
        count = torch.full_like(loss, images)
        self.totals.add_(torch.stack([loss.double() * images, correct.double(), count.double()]))
        self.step.add_(1)

    def reset(self) -> None:
        self.totals.zero_()

    def read(self) -> Reading:
        """Waits for the device, and for the other processes."""
        totals = self.totals if self.join is None else self.join(self.totals.clone())
        loss, correct, images, bad = [*totals.tolist(), self.bad_step.item()]
        images = max(images, 1.0)
        return Reading(loss / images, 100 * correct / images, None if bad < 0 else int(bad))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; all processes have to ask, since the sums are those of all of them."""
        totals = self.totals.clone() if self.join is None else self.join(self.totals.clone())
        return {f"meter.{name}": getattr(self, name).clone() for name in NAMES} | {"meter.totals": totals}

    def restore_(self, tensors: dict[str, Tensor]) -> None:
        for name in NAMES:
            getattr(self, name).copy_(tensors[f"meter.{name}"])
        if not self.is_first:
            # One of the processes has the sums of all.
            self.totals.zero_()
