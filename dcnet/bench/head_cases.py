"""The heads that are timed: plain softmax, a margin, and one process's share of the classes, whole and sampled."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.bench.shapes import Ceilings, Work
from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.losses.collectives import Gathered, gather_rows
from dcnet.losses.head import _full_precision

LINEAR, MARGIN, SHARDED, SAMPLED = "linear", "margin", "sharded", "sampled"
HEADS = (LINEAR, MARGIN, SHARDED, SAMPLED)
# So small that the weights stay what they are, however often they are timed.
RATE = 1e-4
SINGLE = 4


@dataclass(frozen=True)
class Size:
    """Features [batch, features] against so many classes."""

    classes: int
    batch: int
    features: int
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        return self.classes * self.features * self.itemsize

    @property
    def logit_bytes(self) -> int:
        """Of one copy of the logits, which are float32 whatever the weights are."""
        return self.batch * self.classes * SINGLE

    def floor_ms(self, ceilings: Ceilings, share: float = 1.0) -> float:
        """Forward, backward and step one after the other: every byte moved once in each, every product formed.

        Forward reads weights and writes logits; backward reads both and writes the gradient; the step reads weights and
        gradient and writes weights. With a share of the classes, all of it is that much less.
        """
        weights, logits = round(share * self.weight_bytes), round(share * self.logit_bytes)
        products = round(share * 2 * self.batch * self.features * self.classes)
        passes = [Work(weights + logits, products), Work(2 * weights + logits, 2 * products), Work(3 * weights, 0)]
        return sum(work.floor_ms(ceilings) for work in passes)

    def floor_bytes(self, share: float = 1.0) -> int:
        """All weights, the gradient of those that are used, and their logits once."""
        return self.weight_bytes + round(share * (self.weight_bytes + self.logit_bytes))

    def needed_bytes(self, head: str, share: float = 1.0) -> int:
        """About what a step takes at its peak, as counted in what was allocated: enough to tell what cannot fit.

        Either the weights' gradient weighs most, beside two copies of the logits, or the logits alone.
        """
        weights, logits = self.weight_bytes, self.logit_bytes
        if head == LINEAR:
            return weights + max(weights + logits, 3 * logits)
        single = self.classes * self.features * SINGLE
        cast = 0 if self.itemsize == SINGLE else single
        # A share marks its own labels, too, in a byte for each logit.
        beyond = cast + max(single + 2 * logits, (3 if head == MARGIN else 3.25) * logits)
        if head == SAMPLED:
            # A copy of what is chosen, and in the end the gradient of all the weights.
            beyond = max(share * (weights + beyond), (1 + share) * weights)
        return round(weights + beyond)


@dataclass(frozen=True)
class HeadStep:
    """Forward, backward and a step of SGD of one head, on features that want a gradient, too."""

    head: nn.Module
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    features: Tensor
    labels: Tensor

    def loss(self) -> Tensor:
        return self.loss_of(self.head, self.features, self.labels)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.features.grad = None
        self.loss().backward()
        self.optimizer.step()


class Share(ShardedMarginSoftmax):
    """What one process of many computes, which a group of one would leave to MarginSoftmax."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        with _full_precision(features):
            joint = Gathered.apply(features.to(self._dtype), self.group)
            return self._shared_loss(joint, gather_rows(labels, self.group), features.dtype)


def make_step(head: str, size: Size, margin: str, sample: float, dtype: torch.dtype, device: str) -> HeadStep:
    """The step of a head with weights and features from fixed seeds, made where it is to run."""
    torch.manual_seed(0)
    with torch.device(device):
        module = _make_head(head, size, margin, sample).to(dtype)
        features = torch.randn(size.batch, size.features).to(dtype).requires_grad_()
        labels = torch.randint(size.classes, (size.batch,))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    return HeadStep(module, plain_loss if head == LINEAR else margin_loss, optimizer, features, labels)


def _make_head(head: str, size: Size, margin: str, sample: float) -> nn.Module:
    if head == LINEAR:
        return nn.Linear(size.features, size.classes)
    if head == MARGIN:
        return MarginSoftmax(size.features, size.classes, margin)
    return Share(size.features, size.classes, margin, sample=sample if head == SAMPLED else 1.0)


def plain_loss(head: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    logits = head(features)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


def margin_loss(head: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    return head(features, labels)


class GroupOfOne:
    """A group of this process alone, in which a share runs as it does among many, without the wire."""

    def __init__(self, device: str):
        self.backend = "nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
        self.own = not dist.is_initialized()

    def __enter__(self) -> None:
        if self.own:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(self.backend, store=store, rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        if self.own:
            dist.destroy_process_group()
