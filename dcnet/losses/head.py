"""The last layer and its loss in one: weights of classes, a margin, a scale, and annealing."""

from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.learnable import check_number
from dcnet.losses.annealing import BY_MARGIN, Easing
from dcnet.losses.cosine import cosines, directions, normalized
from dcnet.losses.diagnosis import Diagnosis, diagnose
from dcnet.losses.easing import Eased
from dcnet.losses.margin import Margin, as_margin
from dcnet.losses.scale import FeatureScale, Scale


class MarginSoftmax(Eased):
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

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: Margin | str = "a-softmax",
        scale: Scale = None,
        annealing: Easing | str | None = BY_MARGIN,
        label_smoothing: float = 0.0,
    ):
        _check_sizes(in_features, num_classes)
        super().__init__(as_margin(margin), annealing)
        _check_smoothing(label_smoothing, self.margin)
        self.in_features, self.num_classes, self.label_smoothing = in_features, num_classes, label_smoothing
        self.weight = nn.Parameter(torch.empty(self._held(num_classes), in_features))
        self.scale = FeatureScale(self.margin.scale if scale is None else scale, self.margin.scale)
        if self.margin.binary and self.scale.is_norm:
            raise ValueError(f"{self.margin.name} decides each class by itself and needs a scale that is a number")
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if self.margin.bias else None
        self.offset = nn.Parameter(torch.zeros(())) if self.margin.binary else None
        self.reset_parameters()

    def _held(self, num_classes: int) -> int:
        """How many of the classes this head holds."""
        return num_classes

    def _chance(self) -> torch.Generator | None:
        """Where the first weights come from; None for torch's own generator."""
        return None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.scale.reset_parameters()
        deviation = (2 / (self.num_classes + self.in_features)) ** 0.5
        nn.init.normal_(self.weight, std=deviation, generator=self._chance())
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.offset is not None:
            # At orthogonal weights a share of the margin is the whole margin at that share of the scale.
            scale = (self.scale.fixed or 1.0) * self.first_share
            nn.init.constant_(self.offset, self.margin.first_bias(self.num_classes, scale))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of features [N, in_features] with labels [N]."""
        labels = self._checked(features, labels)
        with _full_precision(features):
            return self._loss(*directions(features, self._dtype), labels)

    def _loss(self, unit: Tensor, norms: Tensor, labels: Tensor) -> Tensor:
        cos, own, weight_norms = cosines(unit, self.weight.to(self._dtype), labels)
        size, share = self.scale(norms), self._next_share(own)
        target = self._target(own, share) * size
        if not self.margin.unit_weights:
            target = target * weight_norms[labels]
        logits = self._scaled(self._others(cos, share), size, weight_norms)
        if self.bias is not None:
            logits, target = logits + self.bias, target + self.bias[labels]
        if self.margin.binary:
            return self._binary_loss(logits, target, labels) / size.detach()
        # In their place, as no gradient needs what was there; copies of logits are what takes the memory.
        logits = logits.scatter_(1, labels[:, None], target[:, None])
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def _scaled(self, cos: Tensor, size: Tensor, weight_norms: Tensor) -> Tensor:
        scaled = cos * (size[:, None] if size.dim() else size)
        return scaled if self.margin.unit_weights else scaled * weight_norms

    def _binary_loss(self, logits: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        assert self.offset is not None
        own, others = F.softplus(-(target + self.offset)), F.softplus(logits + self.offset)
        others = others.scatter(1, labels[:, None], 0.0).sum(1)
        share = self.margin.label_share()
        return (share * own + (1 - share) * others).mean()

    def logits(self, features: Tensor) -> Tensor:
        """What the classes get without any margin, [N, num_classes]."""
        self._check_features(features)
        with _full_precision(features):
            unit, norms = directions(features, self._dtype)
            weight, bias = self._all_classes()
            weight, weight_norms = normalized(weight.to(self._dtype))
            logits = self._scaled(F.linear(unit, weight), self.scale(norms), weight_norms)
            return logits if bias is None else logits + bias

    def cosines(self, features: Tensor) -> Tensor:
        """cos(theta_j) of each feature and class, [N, num_classes]."""
        self._check_features(features)
        with _full_precision(features):
            weight, _ = normalized(self._all_classes()[0].to(self._dtype))
            return F.linear(directions(features, self._dtype)[0], weight)

    def _all_classes(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of all classes, wherever they are held."""
        return self.weight, self.bias

    def diagnose(self, features: Tensor, labels: Tensor) -> Diagnosis:
        """Where the features of these labels stand, and what the margin asks of them."""
        labels = self._checked(features, labels)
        share = 1.0 if self.annealing is None else float(self.eased_in)
        return diagnose(self.cosines(features.detach()), labels, self.margin, share)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.num_classes}"
        return f"{sizes}, margin={str(self.margin)!r}, s={self.scale}, annealing={self.annealing}"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _fits(self, features: Tensor) -> bool:
        return features.dim() == 2 and features.shape[1] == self.in_features

    def _check_features(self, features: Tensor) -> None:
        if not self._fits(features):
            raise ValueError(f"a head takes features [N, {self.in_features}], not {list(features.shape)}")

    def _checked(self, features: Tensor, labels: Tensor) -> Tensor:
        """The labels as torch counts by them, in int64, or an error of one sentence."""
        if not self._fits(features) or labels.shape != features.shape[:1]:
            wanted = f"features [N, {self.in_features}] and labels [N]"
            raise ValueError(f"a head takes {wanted}, not {list(features.shape)} and {list(labels.shape)}")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, not {labels.dtype}")
        labels = labels.long()
        if labels.is_cuda or torch.compiler.is_compiling():
            return labels  # To look at them here would make the host wait, and break what is compiled in two.
        if (bad := self._strange(labels)) is not None:
            raise ValueError(f"label {bad} is none of the {self.num_classes} classes, from 0 to {self.num_classes - 1}")
        return labels

    def _strange(self, labels: Tensor) -> int | None:
        """The first label that is none of the classes."""
        strange = labels[(labels < 0) | (labels >= self.num_classes)]
        return int(strange[0]) if len(strange) else None


def _check_sizes(in_features: Any, num_classes: Any) -> None:
    whole = all(isinstance(size, Integral) and not isinstance(size, bool) for size in (in_features, num_classes))
    if not whole or in_features < 1 or num_classes < 2:
        found = f"{in_features!r} and {num_classes!r}"
        raise ValueError(f"a head needs a whole number of features and two classes at least, not {found}")


def _check_smoothing(smoothing: Any, margin: Margin) -> None:
    check_number("label_smoothing", smoothing)
    if not 0 <= smoothing < 1:
        raise ValueError(f"label_smoothing must be 0 or more and less than 1, not {smoothing!r}")
    if smoothing and margin.binary:
        raise ValueError(f"{margin.name} decides each class by itself and takes no label_smoothing, not {smoothing!r}")


def _full_precision(features: Tensor) -> Any:
    return torch.autocast(features.device.type, enabled=False)
