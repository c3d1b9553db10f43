"""The last layer and its loss in one: weights of classes, a margin, a scale, and annealing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.losses.annealing import BY_MARGIN, Automatic, Easing, as_easing
from dcnet.losses.cosine import EPS, cosines
from dcnet.losses.diagnosis import Diagnosis, diagnose
from dcnet.losses.margin import Margin, angle, as_margin
from dcnet.losses.scale import FeatureScale, Scale

# As EPS, for features in float16, which must be able to hold the gradient.
HALF_EPS = 1e-6


class MarginSoftmax(nn.Module):
    """loss = head(features, labels); head.logits(features) are without margin, for prediction.

    All is computed in float32 or better, whatever the features are in and under autocast.

    Args:
        in_features: of the features, [N, in_features].
        num_classes: labels are from 0 to one less.
        margin: a spec such as "a-softmax" or "arcface(m=0.3)", or a Margin.
        scale: s: a number, "norm" for ||x||, "learned" or a Learnable; None for what the margin takes by default.
        annealing: an `Annealing`, an `Automatic` or "auto", or None; by default what the margin is known to need.
        label_smoothing: share of the label that is spread over all classes; not for margins that are binary.
    """

    weight: nn.Parameter
    step: Tensor
    eased_in: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: Margin | str = "a-softmax",
        scale: Scale = None,
        annealing: Easing | str | None = BY_MARGIN,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        if in_features < 1 or num_classes < 2:
            raise ValueError(f"a head needs features and two classes at least, not {in_features} and {num_classes}")
        self.margin = as_margin(margin)
        self.in_features, self.num_classes, self.label_smoothing = in_features, num_classes, label_smoothing
        self.annealing = as_easing(annealing, self.margin.eased)
        self.weight = nn.Parameter(torch.empty(self._held(num_classes), in_features))
        self.scale = FeatureScale(self.margin.scale if scale is None else scale, self.margin.scale)
        if self.margin.binary and self.scale.is_norm:
            raise ValueError(f"{self.margin.name} decides each class by itself and needs a scale that is a number")
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if self.margin.bias else None
        self.offset = nn.Parameter(torch.zeros(())) if self.margin.binary else None
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        # How much of the margin is used; all of it where nothing is annealed.
        self.register_buffer("eased_in", torch.tensor(0.0 if isinstance(self.annealing, Automatic) else 1.0))
        self.reset_parameters()

    def _held(self, num_classes: int) -> int:
        """How many of the classes this head holds."""
        return num_classes

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(2 / (self.num_classes + self.in_features)) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.offset is not None:
            nn.init.constant_(self.offset, self.margin.first_bias(self.num_classes, self.scale.fixed or 1.0))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of features [N, in_features] with labels [N]."""
        self._check(features, labels)
        with _full_precision(features):
            return self._loss(*self._directions(features), labels)

    def _loss(self, unit: Tensor, norms: Tensor, labels: Tensor) -> Tensor:
        cos, own, weight_norms = cosines(unit, self.weight.to(self._dtype), labels)
        size = self.scale(norms)
        target = self._eased(own, self._next_share(own)) * size
        if not self.margin.unit_weights:
            target = target * weight_norms[labels]
        logits = self._scaled(self.margin.others(cos), size, weight_norms)
        if self.bias is not None:
            logits, target = logits + self.bias, target + self.bias[labels]
        if self.margin.binary:
            return self._binary_loss(logits, target, labels) / size.detach()
        # In their place, as no gradient needs what was there; copies of logits are what takes the memory.
        logits = logits.scatter_(1, labels[:, None], target[:, None])
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def _eased(self, cos: Tensor, share: Tensor | None) -> Tensor:
        """(lambda cos + psi) / (1 + lambda), of which 1 / (1 + lambda) is the share."""
        psi = self.margin.target(cos)
        return psi if share is None else cos + share * (psi - cos)

    def _scaled(self, cos: Tensor, size: Tensor, weight_norms: Tensor) -> Tensor:
        scaled = cos * (size[:, None] if size.dim() else size)
        return scaled if self.margin.unit_weights else scaled * weight_norms

    def _binary_loss(self, logits: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        assert self.offset is not None
        own, others = F.softplus(-(target + self.offset)), F.softplus(logits + self.offset)
        others = others.scatter(1, labels[:, None], 0.0).sum(1)
        share = self.margin.label_share()
        return (share * own + (1 - share) * others).mean()

    @torch.no_grad()
    def _next_share(self, cos: Tensor) -> Tensor | None:
        """How much of the margin counts in this batch; in training it moves on."""
        if self.annealing is None:
            return None
        if self.training:
            if isinstance(self.annealing, Automatic):
                degrees = torch.rad2deg(angle(cos)).mean()
                self.eased_in.copy_(self.annealing.next_weight(self.eased_in, degrees.to(self.eased_in)))
            else:
                self.eased_in.copy_(self.annealing.weight(self.step))
            self.step.add_(1)
        elif not isinstance(self.annealing, Automatic):
            self.eased_in.copy_(self.annealing.weight(self.step))
        # A copy, since the next batch changes it before the gradients of this one may be asked for.
        return self.eased_in.to(cos.dtype).clone()

    def logits(self, features: Tensor) -> Tensor:
        """What the classes get without any margin, [N, num_classes]."""
        with _full_precision(features):
            unit, norms = self._directions(features)
            weights, weight_norms = _normalized(self.weight.to(self._dtype))
            logits = self._scaled(F.linear(unit, weights), self.scale(norms), weight_norms)
            return logits if self.bias is None else logits + self.bias

    def cosines(self, features: Tensor) -> Tensor:
        """cos(theta_j) of each feature and class, [N, num_classes]."""
        with _full_precision(features):
            weights, _ = _normalized(self.weight.to(self._dtype))
            return F.linear(self._directions(features)[0], weights)

    def _directions(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features of norm 1, and the norms they had."""
        return _normalized(features.to(self._dtype), HALF_EPS if features.dtype == torch.float16 else EPS)

    def diagnose(self, features: Tensor, labels: Tensor) -> Diagnosis:
        """Where the features of these labels stand, and what the margin asks of them."""
        self._check(features, labels)
        share = 1.0 if self.annealing is None else float(self.eased_in)
        return diagnose(self.cosines(features.detach()), labels, self.margin, share)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.num_classes}"
        return f"{sizes}, margin={str(self.margin)!r}, s={self.scale}, annealing={self.annealing}"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _check(self, features: Tensor, labels: Tensor) -> None:
        shape = list(features.shape)
        if features.dim() != 2 or shape[1] != self.in_features or labels.shape != features.shape[:1]:
            wanted = f"features [N, {self.in_features}] and labels [N]"
            raise ValueError(f"a head takes {wanted}, not {shape} and {list(labels.shape)}")
        if labels.is_cuda or torch.compiler.is_compiling():
            return  # To look at them here would make the host wait, and break what is compiled in two.
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            bad = next(int(label) for label in labels if not 0 <= int(label) < self.num_classes)
            raise ValueError(f"label {bad} is none of the {self.num_classes} classes, from 0 to {self.num_classes - 1}")


def _normalized(rows: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """The rows over their norms, and the norms."""
    squares = rows.square().sum(1) + eps
    return rows * squares.rsqrt()[:, None], squares.sqrt()


def _full_precision(features: Tensor) -> Any:
    return torch.autocast(features.device.type, enabled=False)
