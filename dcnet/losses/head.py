"""The last layer and its loss in one: weights of classes, a margin, a scale, and annealing."""

from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.arrays import Numbers, as_tensor
from dcnet.learnable import check_number
from dcnet.losses.annealing import BY_MARGIN, Easing
from dcnet.losses.cosine import cosines, directions
from dcnet.losses.diagnosis import Diagnosis, diagnose
from dcnet.losses.easing import Eased
from dcnet.losses.margin import Margin, as_margin
from dcnet.losses.scale import FeatureScale, Scale

REDUCTIONS = ("mean", "sum", "none")
# The label that torch's cross entropy ignores by default.
IGNORED = -100


class MarginSoftmax(Eased):
    """A last layer with its loss: loss = head(features, labels).

    `head.logits(features)` gives the logits without margin, for prediction. Everything is computed in float32 or
    better, whatever the dtype of the features and under autocast.

    Args:
        in_features: the number of features of a sample; a batch is [N, in_features].
        num_classes: the number of classes; labels are integers from 0 to num_classes - 1.
        margin: a spec such as "a-softmax", "arcface(m=0.3)" or "cosface", or a `Margin`; see `dcnet list margins`.
        scale: the scale s: a number, "norm" for ||x||, "learned" or a `Learnable`; None for the margin's default.
        annealing: an `Annealing`, an `Automatic` or "auto", or None for the full margin from the first step; by
            default what the margin needs.
        label_smoothing: the share of the label that is spread over all classes, as in torch's cross entropy.
            Margins that decide each class by itself (sphereface2) do not support it.
        reduction: "mean", "sum" or "none", as in torch's cross entropy: the mean over all samples that are not
            ignored, their sum, or one loss for each sample, which is 0 where it is ignored. The mean of an empty
            batch, or of one that is ignored altogether, is nan, with gradients of 0; the sum is 0.
        ignore_index: samples with this label are ignored: they have no loss and no gradient, and annealing does not
            count their angles. It need not be one of the classes.
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
        reduction: str = "mean",
        ignore_index: int = IGNORED,
    ):
        _check_sizes(in_features, num_classes)
        super().__init__(as_margin(margin), annealing)
        _check_smoothing(label_smoothing, self.margin)
        _check_reduction(reduction, ignore_index)
        self.reduction, self.ignore_index = reduction, int(ignore_index)
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
        """The loss of a batch: a number, or one for each sample with reduction="none".

        Args:
            features: [N, in_features], of any floating-point dtype.
            labels: integers [N].
        """
        labels = self._checked(features, labels)
        with _full_precision(features):
            return self._loss(*directions(features, self._dtype), labels)

    def _loss(self, unit: Tensor, norms: Tensor, labels: Tensor) -> Tensor:
        kept, places = self._places(labels)
        cos, own, weight_norms = cosines(unit, self.weight.to(self._dtype), places)
        size, share = self.scale(norms), self._next_share(own, kept)
        target = self._target(own, share) * size
        if not self.margin.unit_weights:
            target = target * weight_norms[places]
        logits = self._scaled(self._others(cos, share), size, weight_norms)
        if self.bias is not None:
            logits, target = logits + self.bias, target + self.bias[places]
        if self.margin.binary:
            return self._reduced(self._binary_losses(logits, target, places) / size.detach(), kept)
        # In their place, as no gradient needs what was there; copies of logits are what takes the memory.
        logits = logits.scatter_(1, places[:, None], target[:, None])
        return F.cross_entropy(
            logits,
            labels,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def _places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples count, bool [N], and the labels with a class in the place of those that are ignored."""
        kept = labels != self.ignore_index
        return kept, labels.masked_fill(~kept, 0)

    def _reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        """Losses [N] reduced as by torch's cross entropy."""
        losses = losses.masked_fill(~kept, 0.0)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / kept.sum()

    def _scaled(self, cos: Tensor, size: Tensor, weight_norms: Tensor) -> Tensor:
        scaled = cos * (size[:, None] if size.dim() else size)
        return scaled if self.margin.unit_weights else scaled * weight_norms

    def _binary_losses(self, logits: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        assert self.offset is not None
        own, others = F.softplus(-(target + self.offset)), F.softplus(logits + self.offset)
        others = others.scatter(1, labels[:, None], 0.0).sum(1)
        share = self.margin.label_share()
        return share * own + (1 - share) * others

    def logits(self, features: Tensor) -> Tensor:
        """What the classes get without any margin, [N, num_classes]."""
        self._check_features(features)
        with _full_precision(features):
            unit, norms = directions(features, self._dtype)
            weight, bias = self._all_classes()
            weight, weight_norms = directions(weight, self._dtype, self._dtype)
            logits = self._scaled(F.linear(unit, weight), self.scale(norms), weight_norms)
            return logits if bias is None else logits + bias

    def cosines(self, features: Tensor) -> Tensor:
        """cos(theta_j) of each feature and class, [N, num_classes]."""
        self._check_features(features)
        with _full_precision(features):
            weight, _ = directions(self._all_classes()[0], self._dtype, self._dtype)
            return F.linear(directions(features, self._dtype)[0], weight)

    def _all_classes(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of all classes, wherever they are held."""
        return self.weight, self.bias

    def diagnose(self, features: Numbers, labels: Numbers) -> Diagnosis:
        """The angles of features [N, in_features] to the weights of their labels [N], and what the margin asks of them.

        Both may be tensors, NumPy arrays or lists. Samples that are ignored are left out.
        """
        features, labels = (
            as_tensor(given, name).to(self.weight.device)
            for given, name in ((features, "features"), (labels, "labels"))
        )
        labels = self._checked(features, labels)
        share = 1.0 if self.annealing is None else float(self.eased_in)
        kept = labels != self.ignore_index
        return diagnose(self.cosines(features.detach())[kept], labels[kept], self.margin, share)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.num_classes}"
        shown = f"{sizes}, margin={str(self.margin)!r}, s={self.scale}, annealing={self.annealing}"
        given = {"reduction": (self.reduction, "mean"), "ignore_index": (self.ignore_index, IGNORED)}
        return shown + "".join(f", {name}={value!r}" for name, (value, default) in given.items() if value != default)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _fits(self, features: Tensor) -> bool:
        return features.dim() == 2 and features.shape[1] == self.in_features

    def _check_features(self, features: Tensor) -> None:
        _check_tensor("features", features)
        if not self._fits(features):
            raise ValueError(f"a head takes features [N, {self.in_features}], not {list(features.shape)}")

    def _checked(self, features: Tensor, labels: Tensor) -> Tensor:
        """The labels as torch counts by them, in int64, or an error of one sentence."""
        for name, value in (("features", features), ("labels", labels)):
            _check_tensor(name, value)
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
        strange = labels[((labels < 0) | (labels >= self.num_classes)) & (labels != self.ignore_index)]
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


def _check_reduction(reduction: Any, ignore_index: Any) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool):
        raise ValueError(f"ignore_index must be an integer, not {ignore_index!r}")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} of a head must be a tensor, not {type(value).__name__}: use torch.as_tensor({name})")


def _full_precision(features: Tensor) -> Any:
    return torch.autocast(features.device.type, enabled=False)
