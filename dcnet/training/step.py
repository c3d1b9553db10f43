"""One step of training: forward, loss, backward, optimizer, and the sums that are reported."""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dcnet.training.meter import Meter
from dcnet.training.objective import Objective, correct


class Step:
    """Trains on a batch; nothing in it waits for the device, so that it can be captured."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, objective: Objective, meter: Meter
    ):
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.objective, self.meter = objective, meter
        # A loss or a gradient that is not finite must not reach the weights, which tell where it came from.
        optimizer.found_inf = meter.found_bad  # type: ignore[attr-defined]

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, logits = self.objective.loss(self.model, images, labels)
        self.accelerator.backward(loss + self.objective.constraint())
        self.meter.add(loss, correct(logits, labels), len(labels), self._largest_gradient())
        self.optimizer.step()

    @torch.no_grad()
    def _largest_gradient(self) -> Tensor | None:
        """Not finite if any gradient is not; None where processes hold gradients in shares."""
        held = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [gradient for gradient in held if gradient is not None]
        if not gradients or hasattr(gradients[0], "device_mesh"):
            return None
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).amax()
