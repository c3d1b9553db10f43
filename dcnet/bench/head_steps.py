"""The timed heads: linear, margin, one share of a sharded head, and a share with sampled classes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.bench.shapes import Ceilings, Work
from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax

LINEAR, MARGIN, SHARDED, SAMPLED = "linear", "margin", "sharded", "sampled"
HEADS = (LINEAR, MARGIN, SHARDED, SAMPLED)
# So small that the weights hardly change, even after many timed steps.
RATE = 1e-4
SINGLE = 4


@dataclass(frozen=True)
class Size:
    """The size of a head: features [batch, features] and weights [classes, features]."""

    classes: int
    batch: int
    features: int
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        return self.classes * self.features * self.itemsize

    @property
    def logit_bytes(self) -> int:
        """Size of the logits, which are float32 for any dtype of the weights."""
        return self.batch * self.classes * SINGLE

    def floor_ms(self, ceilings: Ceilings, share: float = 1.0) -> float:
        """Lower bound of the time: each pass moves every byte once and computes every product.

        Forward reads weights and writes logits; backward reads both and writes the gradient; the step reads weights and
        gradient and writes weights. `share` is the fraction of the classes.
        """
        weights, logits = round(share * self.weight_bytes), round(share * self.logit_bytes)
        products = round(share * 2 * self.batch * self.features * self.classes)
        passes = [Work(weights + logits, products), Work(2 * weights + logits, 2 * products), Work(3 * weights, 0)]
        return sum(work.floor_ms(ceilings) for work in passes)

    def floor_bytes(self, share: float = 1.0) -> int:
        """Lower bound of the memory: all weights, the gradient of the used ones, and their logits once."""
        return self.weight_bytes + round(share * (self.weight_bytes + self.logit_bytes))

    def needed_bytes(self, head: str, share: float = 1.0) -> int:
        """Approximate peak memory of a step, to skip heads that do not fit.

        The peak is either at the gradient of the weights with two copies of the logits, or at the logits alone.
        """
        weights, logits = self.weight_bytes, self.logit_bytes
        if head == LINEAR:
            return weights + max(weights + logits, 3 * logits)
        single = self.classes * self.features * SINGLE
        cast = 0 if self.itemsize == SINGLE else single
        # A share also has a mask of one byte per logit.
        beyond = cast + max(single + 2 * logits, (3 if head == MARGIN else 3.25) * logits)
        if head == SAMPLED:
            # A copy of the sampled weights, and at the end the gradient of all weights.
            beyond = max(share * (weights + beyond), (1 + share) * weights)
        return round(weights + beyond)


@dataclass(frozen=True)
class HeadStep:
    """Forward, backward (also to the features) and an SGD step of a head."""

    head: nn.Module
    optimizer: torch.optim.Optimizer
    features: Tensor
    labels: Tensor

    def loss(self) -> Tensor:
        return self.head(self.features, self.labels)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.features.grad = None
        self.loss().backward()
        self.optimizer.step()


class LinearHead(nn.Linear):
    """A linear layer and cross entropy in float32 or better."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(features)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


class Share(ShardedMarginSoftmax):
    """One process of many in a sharded head; in a group of one, a sharded head would compute a MarginSoftmax."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.joint_loss(features, labels)


def make_step(head: str, size: Size, margin: str, sample: float, dtype: torch.dtype, device: str) -> HeadStep:
    """The step of a head with weights and features from fixed seeds."""
    torch.manual_seed(0)
    with torch.device(device):
        module = _make_head(head, size, margin, sample).to(dtype)
        features = torch.randn(size.batch, size.features).to(dtype).requires_grad_()
        labels = torch.randint(size.classes, (size.batch,))
    return HeadStep(module, torch.optim.SGD(module.parameters(), lr=RATE), features, labels)


def _make_head(head: str, size: Size, margin: str, sample: float) -> nn.Module:
    if head == LINEAR:
        return LinearHead(size.features, size.classes)
    if head == MARGIN:
        return MarginSoftmax(size.features, size.classes, margin)
    return Share(size.features, size.classes, margin, sample=sample if head == SAMPLED else 1.0)


class GroupOfOne:
    """A process group of one, so that a share runs without communication."""

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
