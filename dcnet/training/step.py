"""One training step: forward, loss, backward, optimizer and metrics, captured as a CUDA graph; values not finite."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dcnet import regularizers
from dcnet.models.blocks import head_of_shards
from dcnet.optim import WeightProjection
from dcnet.training.adversarial import Target, as_adversary
from dcnet.training.config import RunConfig
from dcnet.training.processes import agree

NAMES = ("totals", "bad_step", "step")
# Eager calls before a capture.
WARMUP = 3
LOSS_ITSELF = "all outputs and gradients of layers are finite, so it is the loss itself"
# Sums a tensor over all processes.
Join = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reading:
    """Mean loss and accuracy in % since the last reset; `bad_step` is the first step that was not finite, if any."""

    loss: float
    accuracy: float
    bad_step: int | None


class Meter:
    """Accumulates loss and accuracy on the device, and finds the first step that is not finite."""

    def __init__(self, device: torch.device, join: Join | None = None, is_first: bool = True):
        self.join, self.is_first = join, is_first
        # The sums of losses, correct predictions and images.
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        # The `found_inf` of fused optimizers: they skip the step if it is 1.
        self.found_bad = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, correct: Tensor, images: int, gradient: Tensor | None = None) -> None:
        """Adds a step; from the first bad step on, the optimizer skips all steps.

        A step is bad if its loss or `gradient`, its largest gradient, is not finite.
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
        """Returns the current means; waits for the device and the other processes."""
        totals = self.totals if self.join is None else self.join(self.totals.clone())
        loss, correct, images, bad = [*totals.tolist(), self.bad_step.item()]
        images = max(images, 1.0)
        return Reading(loss / images, 100 * correct / images, None if bad < 0 else int(bad))

    def state(self) -> dict[str, Tensor]:
        """Returns the sums over all processes, for a checkpoint; all processes must call this."""
        totals = self.totals.clone() if self.join is None else self.join(self.totals.clone())
        return {f"meter.{name}": getattr(self, name).clone() for name in NAMES} | {"meter.totals": totals}

    def restore_(self, tensors: dict[str, Tensor]) -> None:
        for name in NAMES:
            getattr(self, name).copy_(tensors[f"meter.{name}"])
        if not self.is_first:
            # The restored totals are sums over all processes, so only the first one keeps them.
            self.totals.zero_()


def classification_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, log_floor: float = 0.0) -> Tensor:
    """Returns the mean of -sum_j y_j log(softmax(logits)_j + log_floor), with smoothed labels y."""
    if log_floor == 0:
        return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
    logs = (logits.float().softmax(1) + log_floor).log()
    target = logs.gather(1, labels[:, None]).squeeze(1)
    return -((1 - smoothing) * target + smoothing * logs.mean(1)).mean()


Call = Callable[..., Any]


class Objective:
    """Computes the loss of a batch, and the orthonormality penalty of the filters."""

    def __init__(self, config: RunConfig, model: nn.Module):
        self.config, self.model = config, model
        self.adversary = None if config.adversary is None else as_adversary(config.adversary)

    def loss(self, network: Call, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns loss and logits, or predicted classes, with adversarial images if the config has an adversary."""
        if self.adversary is None:
            return self._plain_loss(network, images, labels)
        # Attacks call the module itself: DDP would wait for gradients of other processes.
        joins = isinstance(network, DistributedDataParallel)
        target = Target(network, self.model if joins else network, self.model)
        return self.adversary.loss(self._plain_loss, target, images, labels)

    def _plain_loss(self, network: Call, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns loss and predictions of the margin head, or the classification loss and logits."""
        if self.config.margin is not None:
            return network(images, labels)
        logits = network(images)
        return classification_loss(logits, labels, self.config.label_smoothing, self.config.log_floor), logits

    def backward(self, loss: Tensor, accelerator: Accelerator) -> None:
        """Computes the gradients of the loss and of the orthonormality penalty, which does not depend on the batch."""
        factor = 0.5 * self.config.orthonormal
        direct = factor == 0 or regularizers.has_direct_gradients(self.model)
        accelerator.backward(loss if direct else loss + factor * regularizers.orthonormal(self.model))
        if direct and factor:
            regularizers.orthonormal_backward_(self.model, factor)


@torch.no_grad()
def correct(predictions: Tensor, labels: Tensor) -> Tensor:
    """Returns the number of correct predictions, which are logits [N, C] or classes [N]."""
    classes = predictions if predictions.dim() == 1 else predictions.argmax(1)
    return (classes == labels).sum()


def outputs_of(model: nn.Module, images: Tensor) -> Any:
    """Returns the output of the network; for a sharded head its input, since logits would need the weights of all.

    The caller turns on autocast, which `accelerate` does in `forward` only.
    """
    return model(images) if head_of_shards(model) is None else model.features(images)  # type: ignore[operator]


def check_labels(labels: Tensor, classes: int, join: Join | None = None) -> None:
    """Raises ValueError in all processes if one of them has a label that is not a class; the others would wait."""
    invalid = labels[(labels < 0) | (labels >= classes)]
    count = torch.tensor(float(len(invalid)))
    if (count if join is None else join(count)) == 0:
        return

    def report() -> None:
        if len(invalid):
            number = int(invalid[0])
            raise ValueError(f"label {number} must be one of the {classes} classes, from 0 to {classes - 1}")

    agree(report)


class Step:
    """Trains on a batch without waiting for the device, so that it can be captured as a CUDA graph.

    A projection, if given, is applied in every step. If `classes` is given, labels are checked, except on a GPU, where
    that would wait for the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        meter: Meter,
        projection: WeightProjection | None = None,
        classes: int | None = None,
    ):
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.objective, self.meter, self.projection = objective, meter, projection
        self.classes = classes
        # The weights must stay finite, since they are used to find the failing layer.
        optimizer.found_inf = meter.found_bad  # type: ignore[attr-defined]

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        if self.classes is not None and not labels.is_cuda:
            check_labels(labels, self.classes, self.meter.join)
        self.optimizer.zero_grad(set_to_none=True)
        loss, predictions = self.objective.loss(self.model, images, labels)
        self.objective.backward(loss, self.accelerator)
        self.meter.add(loss, correct(predictions, labels), len(labels), self._largest_gradient())
        self.optimizer.step()
        if self.projection is not None:
            self.projection.project_()

    @torch.no_grad()
    def _largest_gradient(self) -> Tensor | None:
        """Returns the largest absolute gradient, which is not finite if any gradient is not; None if sharded."""
        held = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [gradient for gradient in held if gradient is not None]
        if not gradients or hasattr(gradients[0], "device_mesh"):
            return None
        return torch.stack(torch._foreach_norm(gradients, float("inf"))).amax()


class Captured:
    """Wraps a function of tensors: the first calls run eagerly, the next is captured as a CUDA graph and replayed.

    Calls with tensors of other shapes than the captured ones also run eagerly.
    """

    def __init__(self, call: Callable[..., None], warmup: int = WARMUP):
        self.call, self.warmup, self.calls = call, warmup, 0
        self.static: list[Tensor] = []
        self.graph, self.side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, *tensors: Tensor) -> None:
        self.calls += 1
        if self.calls <= self.warmup:
            self._warm_up(*tensors)
            return
        if not self.static:
            self.static = [tensor.clone() for tensor in tensors]
            with torch.cuda.graph(self.graph):
                self.call(*self.static)
        if any(own.shape != given.shape for own, given in zip(self.static, tensors, strict=True)):
            self.call(*tensors)
            return
        for own, given in zip(self.static, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()

    def _warm_up(self, *tensors: Tensor) -> None:
        """Runs on a side stream, so that libraries are initialized before the capture."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.call(*tensors)
        torch.cuda.current_stream().wait_stream(self.side)


@torch.no_grad()
def find_bad_layer(model: nn.Module, images: Tensor) -> str:
    """Describes the first layer whose weights, output for these images, or gradient are not finite."""
    # Even if a weight is not finite: layers may wait for other processes, whose sharded heads have other weights.
    outputs = _bad_outputs(model, images)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name!r} has values that are not finite"
    if outputs:
        return f"the output of the layer {outputs[0]!r} is the first that is not finite"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"all outputs are finite, but the gradient of {name!r} is not"
    return LOSS_ITSELF


def _bad_outputs(model: nn.Module, images: Tensor) -> list[str]:
    """Returns the names of the modules with an output that is not finite, in the order of their calls."""
    found: list[str] = []
    with ExitStack() as hooks:
        # Containers are checked as well, since their forward may compute something between their children.
        # Each module has its own hook, since torch.compile fails with one hook for all.
        for name, module in model.named_modules():
            hook = _record_bad_output(name or type(module).__name__, found)
            hooks.enter_context(module.register_forward_hook(hook))
        outputs_of(model, images)
    return found


def _record_bad_output(name: str, found: list[str]) -> Callable[[nn.Module, object, object], None]:
    """Returns a hook that appends the name to `found` if the output of its module is not finite."""

    def check(module: nn.Module, inputs: object, output: object) -> None:
        tensors = (value for value in tree_leaves(output) if isinstance(value, Tensor))
        if not all(value.isfinite().all() for value in tensors):
            found.append(name)

    return check
