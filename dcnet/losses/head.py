"""A classification head and its loss: class weights, a margin, a scale, and annealing."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.checks import Numbers, as_tensor, check_choice, check_number, check_tensor, check_whole
from dcnet.losses import fused_head
from dcnet.losses.annealing import BY_MARGIN, AnnealedMargin, AnyAnnealing
from dcnet.losses.cosine import cosines, directions
from dcnet.losses.diagnosis import Diagnosis, diagnose
from dcnet.losses.margins import Margin, as_margin, nearest_centers
from dcnet.parameters import Learnable

Scale = float | str | Learnable | None
START = 16.0
LARGEST = torch.finfo(torch.float32).max


class FeatureScale(nn.Module):
    """The scale s of each feature, as a function of its norm.

    Args:
        asked: the requested scale: a number, "norm" for ||x||, "learned" or a Learnable.
        start: the initial value if it is "learned".
    """

    def __init__(self, asked: Scale, start: float | None = None):
        super().__init__()
        # A learned scale is stored as its logarithm, so that it stays positive.
        self.log: nn.Parameter | None = None
        self.fixed: float | None = None
        if asked is None or asked == "norm":
            return
        if isinstance(asked, str) and asked != "learned":
            raise ValueError(f"scale must be a number, 'norm' or 'learned', not {asked!r}")
        if isinstance(asked, Learnable) and asked.per_channel:
            raise ValueError(f"scale must be one number for all classes, Learnable({asked.init!r}), not {asked!r}")
        value = asked.init if isinstance(asked, Learnable) else (start or START) if isinstance(asked, str) else asked
        check_number("scale", value, above=0, most=LARGEST)
        self.fixed = float(value)
        if isinstance(asked, str | Learnable):
            self.log = nn.Parameter(torch.tensor(math.log(value)))

    def reset_parameters(self) -> None:
        if self.log is not None and self.fixed is not None:
            nn.init.constant_(self.log, math.log(self.fixed))

    def forward(self, norms: Tensor) -> Tensor:
        """s for each feature, [N], or for all of them, []."""
        if self.log is not None:
            # Cast first: in half precision the exponential would have only two or three digits.
            return self.log.to(norms.dtype).exp()
        return norms if self.fixed is None else norms.new_full((), self.fixed)

    @property
    def is_norm(self) -> bool:
        return self.fixed is None

    def __str__(self) -> str:
        if self.fixed is None:
            return "||x||"
        return f"{self.fixed:g}" if self.log is None else f"{self.log.exp().item():g} (learned)"


REDUCTIONS = ("mean", "sum", "none")
# The default of torch's cross entropy.
IGNORED = -100


class MarginSoftmax(AnnealedMargin):
    """A classification layer with its loss: loss = head(features, labels).

    `head.logits(features)` returns the logits without margin, for prediction. Everything is computed in float32 or
    better, for features of any dtype and also under autocast. On a GPU, labels are not checked: one that is no class
    makes the loss nan, or raises an error of CUDA.

    Args:
        in_features: the number of features of a sample; a batch is [N, in_features].
        num_classes: the number of classes; labels are integers from 0 to num_classes - 1.
        margin: a spec such as "a-softmax", "arcface(m=0.3)" or "cosface", or a `Margin`; see `dcnet list margins`.
        scale: the scale s: a number, "norm" for ||x||, "learned" or a `Learnable`; None for the margin's default.
        annealing: an `Annealing`, an `Automatic` or "auto", or None for the full margin from the first step; by
            default the one that the margin needs.
        label_smoothing: the share of the target that is spread over all classes, as in torch's cross entropy.
            Binary margins (sphereface2, uniface) do not support it.
        reduction: "mean", "sum" or "none", as in torch's cross entropy: the mean over all samples that are not
            ignored, their sum, or one loss for each sample, which is 0 where it is ignored. The mean of an empty
            batch, or of a batch whose samples are all ignored, is nan, with gradients of 0; the sum is 0.
        ignore_index: samples with this label are ignored: they have no loss and no gradient, and annealing does not
            count their angles. It need not be one of the classes.
        interclass_filtering_threshold: other classes with a cosine above this number, in (0, 1], are left out of the
            loss of a sample, since they may be the same class under another label. None leaves out none.
    """

    weight: nn.Parameter
    # The spec of the margin if there are kernels for it.
    fused_spec: str | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: Margin | str = "a-softmax",
        scale: Scale = None,
        annealing: AnyAnnealing | str | None = BY_MARGIN,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        ignore_index: int = IGNORED,
        interclass_filtering_threshold: float | None = None,
    ):
        in_features = check_whole("in_features", in_features, least=1)
        num_classes = check_whole("num_classes", num_classes, least=2)
        super().__init__(as_margin(margin), annealing)
        self.fused_spec = fused_head.fused_spec(self.margin)
        check_number("label_smoothing", label_smoothing, least=0, below=1)
        if label_smoothing and self.margin.binary:
            raise ValueError(f"margin {self.margin.name!r} does not support label_smoothing (got {label_smoothing!r})")
        check_choice("reduction", reduction, REDUCTIONS)
        self.reduction, self.ignore_index = reduction, check_whole("ignore_index", ignore_index)
        self.in_features, self.num_classes, self.label_smoothing = in_features, num_classes, label_smoothing
        self.interclass_filtering_threshold = interclass_filtering_threshold
        self._check_filtering()
        self.held_classes = self._held_classes(num_classes)
        self.weight = nn.Parameter(torch.empty(self.held_classes * self.margin.centers(), in_features))
        self.scale = FeatureScale(self.margin.scale if scale is None else scale, self.margin.scale)
        if self.margin.binary and self.scale.is_norm:
            raise ValueError(f"margin {self.margin.name!r} requires a scale that is a number, not ||x||")
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if self.margin.bias else None
        self.offset = nn.Parameter(torch.zeros(())) if self.margin.binary else None
        self.reset_parameters()

    def _check_filtering(self) -> None:
        threshold = self.interclass_filtering_threshold
        if threshold is None:
            return
        check_number("interclass_filtering_threshold", threshold, above=0, most=1)
        if self.label_smoothing:
            raise ValueError(
                f"interclass_filtering_threshold={threshold!r} and label_smoothing={self.label_smoothing!r} exclude "
                "each other, since smoothing needs all classes: give one"
            )

    def _held_classes(self, num_classes: int) -> int:
        """The number of classes whose weights this head holds."""
        return num_classes

    def _init_weight(self, deviation: float) -> None:
        nn.init.normal_(self.weight, std=deviation)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.scale.reset_parameters()
        self._init_weight((2 / (self.num_classes + self.in_features)) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.offset is not None:
            # For orthogonal weights, a share of the margin equals the full margin at that share of the scale.
            scale = (self.scale.fixed or 1.0) * self.first_share
            nn.init.constant_(self.offset, self.margin.first_bias(self.num_classes, scale))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: a number, or one for each sample with reduction="none".

        Args:
            features: [N, in_features], of any floating-point dtype.
            labels: integers [N].
        """
        labels = self._checked(features, labels)
        if fused_head.fits(self, features, labels):
            return fused_head.fused_loss(self, features, labels)
        with without_autocast(features):
            return self._loss(*directions(features, self._dtype), labels)

    def loss_and_predictions(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the logits without a margin; a sharded head predicts classes [N] instead."""
        return self(features, labels), self.logits(features)

    def _loss(self, unit: Tensor, norms: Tensor, labels: Tensor) -> Tensor:
        kept, places = self._places(labels)
        cos, own, weight_norms = self._class_cosines(unit, self.weight, places)
        size, share, batch = self.scale(norms), self._next_share(own, kept), self._next_batch(own, norms, kept)
        target = self._target_logits(self._target(own, share, batch) * size, weight_norms, self.bias, places)
        logits = self._logits(self._others(cos, share, batch), size, weight_norms, self.bias)
        logits = self._without_duplicates(logits, cos)
        if self.margin.binary:
            loss = self._reduced(self._binary_losses(logits, target, places, size.detach()), kept)
        else:
            # In place: no gradient needs the old values, and copies of the logits dominate the memory.
            loss = self._cross_entropy(logits.scatter_(1, places[:, None], target[:, None]), labels)
        penalty = self.margin.penalty(norms)
        return loss if penalty is None else loss + self._reduced(penalty, kept)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            labels,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def _class_cosines(self, unit: Tensor, weight: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines with all classes [N, C] and with those at `places` [N], and the norms of the weights."""
        centers = self.margin.centers()
        if centers == 1:
            return cosines(unit, weight.to(self._dtype), places)
        cos, _, weight_norms = cosines(unit, weight.to(self._dtype), places)
        cos = nearest_centers(cos, centers)
        return cos, cos.gather(1, places[:, None])[:, 0], weight_norms

    def _without_duplicates(self, logits: Tensor, cos: Tensor) -> Tensor:
        """The logits with -inf where the cosine is above `interclass_filtering_threshold`."""
        if self.interclass_filtering_threshold is None:
            return logits
        return logits.masked_fill(cos.detach() > self.interclass_filtering_threshold, -math.inf)

    def _places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples are not ignored, bool [N], and the labels, with class 0 for ignored samples."""
        kept = labels != self.ignore_index
        return kept, labels.masked_fill(~kept, 0)

    def _reduced(self, losses: Tensor, kept: Tensor) -> Tensor:
        """Losses [N] reduced as in torch's cross entropy."""
        losses = losses.masked_fill(~kept, 0.0)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / kept.sum()

    def _logits(self, cos: Tensor, size: Tensor, weight_norms: Tensor, bias: Tensor | None) -> Tensor:
        """The logits [N, C] from the cosines [N, C]."""
        logits = cos * (size[:, None] if size.dim() else size)
        logits = logits if self.margin.unit_weights else logits * weight_norms
        return logits if bias is None else logits + bias

    def _target_logits(self, scaled: Tensor, weight_norms: Tensor, bias: Tensor | None, places: Tensor) -> Tensor:
        """The logits [N] of the classes at `places`, from s psi(theta)."""
        target = scaled if self.margin.unit_weights else scaled * weight_norms[places]
        return target if bias is None else target + bias[places]

    def _binary_losses(self, logits: Tensor, target: Tensor, labels: Tensor, size: Tensor) -> Tensor:
        assert self.offset is not None
        own, others = F.softplus(-(target + self.offset)), F.softplus(logits + self.offset)
        others = others.scatter(1, labels[:, None], 0.0).sum(1)
        of_own, of_others = self.margin.loss_weights(size)
        return of_own * own + of_others * others

    def logits(self, features: Tensor) -> Tensor:
        """The logits without a margin, [N, num_classes]."""
        self._check_features(features)
        with without_autocast(features):
            unit, norms = directions(features, self._dtype)
            weight, bias = self._all_classes()
            weight, weight_norms = directions(weight, self._dtype, self._dtype)
            cos = nearest_centers(F.linear(unit, weight), self.margin.centers())
            return self._logits(cos, self.scale(norms), weight_norms, bias)

    def cosines(self, features: Tensor) -> Tensor:
        """cos(theta_j) for each feature and class, [N, num_classes]."""
        self._check_features(features)
        with without_autocast(features):
            weight, _ = directions(self._all_classes()[0], self._dtype, self._dtype)
            return nearest_centers(F.linear(directions(features, self._dtype)[0], weight), self.margin.centers())

    def _all_classes(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of all classes, including those that other processes hold."""
        return self.weight, self.bias

    def diagnose(self, features: Numbers, labels: Numbers) -> Diagnosis:
        """The angles of features [N, in_features] to the weights of their labels [N], and the effect of the margin.

        Both may be tensors, NumPy arrays or lists. Ignored samples are left out.
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
        given = {
            "reduction": (self.reduction, "mean"),
            "ignore_index": (self.ignore_index, IGNORED),
            "interclass_filtering_threshold": (self.interclass_filtering_threshold, None),
        }
        return shown + "".join(f", {name}={value!r}" for name, (value, default) in given.items() if value != default)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _fits(self, features: Tensor) -> bool:
        return features.dim() == 2 and features.shape[1] == self.in_features

    def _check_features(self, features: Tensor) -> None:
        check_tensor("features of a head", features)
        if not self._fits(features):
            raise ValueError(f"a head takes features [N, {self.in_features}], not {list(features.shape)}")

    def _checked(self, features: Tensor, labels: Tensor) -> Tensor:
        """The labels in int64; raises ValueError for wrong shapes, dtypes or labels."""
        for name, value in (("features", features), ("labels", labels)):
            check_tensor(f"{name} of a head", value)
        if not self._fits(features) or labels.shape != features.shape[:1]:
            wanted = f"features [N, {self.in_features}] and labels [N]"
            raise ValueError(f"a head takes {wanted}, not {list(features.shape)} and {list(labels.shape)}")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, not {labels.dtype}")
        labels = labels.long()
        if labels.is_cuda or torch.compiler.is_compiling():
            return labels  # Testing the values would synchronize with the host, and break a compiled graph.
        if (bad := self._first_invalid(labels)) is not None:
            raise ValueError(
                f"label {bad} must be one of the {self.num_classes} classes, from 0 to {self.num_classes - 1}"
            )
        return labels

    def _first_invalid(self, labels: Tensor) -> int | None:
        """The first label that is not one of the classes."""
        invalid = labels[((labels < 0) | (labels >= self.num_classes)) & (labels != self.ignore_index)]
        return int(invalid[0]) if len(invalid) else None


def without_autocast(features: Tensor) -> Any:
    """Turns autocast off on the device of the features."""
    return torch.autocast(features.device.type, enabled=False)
