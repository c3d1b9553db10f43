"""The fused head: which heads use it, and one autograd function from features and class weights to the loss."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from dcnet.kernels import head_kernels as kernels
from dcnet.kernels.dispatch import DTYPES, enabled, is_plain_eager, is_traced, is_wrapper, modern
from dcnet.losses.annealing import AnnealedMargin, Annealing, AnyAnnealing, apply_share, recomputing
from dcnet.losses.cosine import cosines, directions
from dcnet.losses.head_passes import Head, Settings, backward, forward, state_memory
from dcnet.losses.margins import Margin, as_margin, registry

# A program holds whole rows of features and weights; rows of a batch are a dimension of a grid.
MOST_FEATURES, MOST_ROWS = 4096, 65_535
# Methods that a subclass must not change without a device function of its own.
EQUATIONS = ("target", "others", "target_in", "others_in", "penalty", "first_state", "centers")
REDUCTIONS = {"mean": kernels.MEAN, "sum": kernels.SUM, "none": kernels.NONE}


def fused_spec(margin: Margin) -> str | None:
    """The spec of a margin that has a device function, for classes of one weight vector each; otherwise None."""
    kind = type(margin)
    owner = next(one for one in kind.__mro__ if "device" in vars(one))
    derived = kind.__mro__[: kind.__mro__.index(owner)]
    changed = any(name in vars(one) for one in derived for name in EQUATIONS)
    known = margin.device is not None and kind in registry.values() and not changed
    supported = known and margin.unit_weights and not margin.binary and margin.device_numbers() is not None
    return str(margin) if supported else None


def fits(head: Any, features: Tensor, labels: Tensor) -> bool:
    """Whether the fused head supports this head, features [N, in_features] and labels [N]."""
    weight = head.weight
    if head.fused_spec is None or not (enabled() and features.is_cuda):
        return False
    return (
        weight.device == features.device == labels.device
        and weight.dtype in DTYPES
        and features.dtype in DTYPES
        and 0 < len(features) <= MOST_ROWS
        and head.in_features <= MOST_FEATURES
        and weight.is_contiguous()
        and not (is_wrapper(features) or is_wrapper(weight))
        and modern(features.device)
        and not is_traced()
    )


def fused_loss(head: Any, features: Tensor, labels: Tensor) -> Tensor:
    """The loss of a `MarginSoftmax`. Call it only if `fits` is true; `labels` are int64."""
    compiling = torch.compiler.is_compiling()
    settings = (settings_of if compiling else _known_settings)(
        head.fused_spec,
        head.scale.fixed,
        head.scale.log is not None,
        head.label_smoothing,
        head.ignore_index,
        head.reduction,
        head.interclass_filtering_threshold,
        head.annealing,
        head.training,
        recomputing(),
    )
    given = (features, head.weight, head.scale.log, labels.contiguous(), head.step, head.eased_in)
    if is_plain_eager(features):
        loss: Tensor = FusedHead.apply(*given, settings)
        return loss
    loss, *_, step, eased = torch.ops.dcnet.head.default(*given, *settings)
    _keep(head, step, eased)
    return loss


@torch.no_grad()
def _keep(head: AnnealedMargin, step: Tensor, eased: Tensor) -> None:
    if head.annealing is not None:
        head.step.copy_(step)
        head.eased_in.copy_(eased)


def settings_of(
    margin: str,
    scale: float | None,
    learned: bool,
    smoothing: float,
    ignored: int,
    reduction: str,
    threshold: float | None,
    annealing: AnyAnnealing | None,
    training: bool,
    again: bool,
) -> Settings:
    """The settings of a head; `again` says that a batch is computed for a second time."""
    share, advances = _share_kind(annealing, training, again)
    kind = kernels.LEARNED if learned else kernels.BY_NORM if scale is None else kernels.BY_NUMBER
    kinds = (kind, ignored, REDUCTIONS[reduction], int(threshold is not None), share, int(advances))
    return Settings(margin, (scale or 1.0, smoothing, threshold or 0.0, *_annealing_numbers(annealing)), kinds)


_known_settings = functools.lru_cache(maxsize=256)(settings_of)


def _share_kind(annealing: AnyAnnealing | None, training: bool, again: bool) -> tuple[int, bool]:
    if annealing is None:
        return kernels.WHOLE, False
    scheduled = isinstance(annealing, Annealing)
    if (training and again) or not (training or scheduled):
        return kernels.KEPT, False
    return kernels.SCHEDULED if scheduled else kernels.AUTOMATIC, training


def _annealing_numbers(annealing: AnyAnnealing | None) -> tuple[float, float, float]:
    if annealing is None:
        return 0.0, 0.0, 0.0
    if isinstance(annealing, Annealing):
        return annealing.start, annealing.rate, annealing.floor
    return annealing.ready, annealing.pace, annealing.most


def differentiable_loss(head: Head, settings: Settings, share: Tensor) -> Tensor:
    """The loss in eager PyTorch, which can be differentiated twice, with a given share of the margin."""
    (scale, smoothing, threshold, *_), (kind, ignored, reduction, filtered, *_) = settings.numbers, settings.kinds
    margin = as_margin(settings.margin)
    unit, norms = directions(head.features, torch.float32)
    places = head.labels.masked_fill(head.labels == ignored, 0)
    cos, own, _ = cosines(unit, head.weight.float(), places)
    size = norms if kind == kernels.BY_NORM else norms.new_full((), scale)
    if head.logarithm is not None:
        size = head.logarithm.float().exp()
    target = apply_share(own, margin.target(own), share) * size
    logits = cos * (size[:, None] if size.dim() else size)
    if filtered:
        logits = logits.masked_fill(cos.detach() > threshold, -torch.inf)
    logits = logits.scatter(1, places[:, None], target[:, None])
    name = next(name for name, known in REDUCTIONS.items() if known == reduction)
    return F.cross_entropy(logits, head.labels, ignore_index=ignored, reduction=name, label_smoothing=smoothing)


def differentiable_gradients(head: Head, settings: Settings, state: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """Gradients of features, weights and the logarithm of the scale, which can be differentiated again."""
    share = state_memory(*map(len, head[:2])).places(state)[3].tensor()[1]
    with torch.enable_grad(), torch.autocast(head.features.device.type, enabled=False):
        loss = differentiable_loss(head, settings, share)
    wanted = [given for given in head[:3] if given is not None and given.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=torch.is_grad_enabled()))
    return [next(found) if given is not None and given.requires_grad else None for given in head[:3]]


class FusedHead(torch.autograd.Function):
    """The loss in eager mode, without the overhead of the dispatcher; updates step and share in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, step, eased, ctx.settings = arguments
        loss, *kept = forward(Head(*given), step, eased, ctx.settings)
        ctx.save_for_backward(*given, *kept)
        ctx.overwritten = False
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *given, products, unit, state = ctx.saved_tensors
        head, (gradient,) = Head(*given), gradients
        if torch.is_grad_enabled() or not torch._C._has_storage(gradient):
            return (*differentiable_gradients(head, ctx.settings, state, gradient), *(None,) * 4)
        if ctx.overwritten:
            head.multiply(unit, products)
        ctx.overwritten = True
        saved, needs = (products, unit, state), ctx.needs_input_grad[:2]
        return (*backward(head, ctx.settings, gradient, saved, needs, in_place=True), *(None,) * 4)


_INPUTS = "Tensor features, Tensor weight, Tensor? logarithm, Tensor labels"
_SETTINGS = "str margin, float[] numbers, int[] kinds"
_LIBRARY = Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    f"head({_INPUTS}, Tensor step, Tensor eased, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"head_backward({_INPUTS}, {_SETTINGS}, Tensor gradient, Tensor products, Tensor unit, Tensor state, "
    "bool features_needed, bool weight_needed) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The number of arguments of the operation.
_COUNT = 9


def _settings(margin: str, numbers: list[float], kinds: list[int]) -> Settings:
    return Settings(margin, tuple(numbers), tuple(kinds))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *given, step, eased, margin, numbers, kinds = arguments
    step, eased = step.clone(), eased.clone()
    return (*forward(Head(*given), step, eased, _settings(margin, numbers, kinds)), step, eased)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    head, settings = Head(*arguments[:4]), _settings(*arguments[4:7])
    gradient, *saved, features, weight = arguments[7:]
    found = backward(head, settings, gradient, tuple(saved), (features, weight), in_place=False)
    return tuple(gradient.new_empty(0) if one is None else one for one in found)


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    *given, step, eased, _, _, kinds = arguments
    head = Head(*given)
    x, count, classes = head.features, head.features.shape[0], head.weight.shape[0]
    loss = x.new_empty(count if kinds[2] == kernels.NONE else (), dtype=torch.float32)
    unit = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    state = unit.new_empty(state_memory(count, classes).total)
    return (loss, unit.new_empty(count, classes), unit, state, step.clone(), eased.clone())


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    head = Head(*arguments[:4])
    features, weight = arguments[-2] or head.logarithm is not None, arguments[-1]
    none = head.features.new_empty(0, dtype=torch.float32)
    log = none if head.logarithm is None else torch.empty_like(head.logarithm)
    of_x = torch.empty(head.features.shape, dtype=head.features.dtype, device=head.features.device)
    return (of_x if features else none, torch.empty_like(head.weight) if weight else none, log)


class _Operation(torch.autograd.Function):
    """The gradient of the custom operation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss, products, unit, state, step, eased = torch.ops.dcnet.head.default(*arguments)
        ctx.mark_non_differentiable(products, unit, state, step, eased)
        ctx.set_materialize_grads(False)
        ctx.settings = arguments[6:]
        ctx.save_for_backward(*arguments[:4], products, unit, state)
        return loss, products, unit, state, step, eased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gradient, *_ = gradients
        if gradient is None:
            return (None,) * _COUNT
        *given, products, unit, state = ctx.saved_tensors
        if type(gradient) is Tensor and (torch.is_grad_enabled() or not torch._C._has_storage(gradient)):
            found = differentiable_gradients(Head(*given), _settings(*ctx.settings), state, gradient)
            return (*found, *(None,) * (_COUNT - 3))
        needs = ctx.needs_input_grad[:3]
        saved = (gradient, products, unit, state)
        found = torch.ops.dcnet.head_backward.default(*given, *ctx.settings, *saved, *needs[:2])
        kept = [one if needed else None for one, needed in zip(found, needs, strict=True)]
        return (*kept, *(None,) * (_COUNT - 3))


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(given, Tensor) and given.requires_grad for given in arguments):
        return _Operation.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dcnet.head.default(*arguments)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("head", _forward, _key)
    _LIBRARY.impl("head_backward", _backward, _key)
_LIBRARY.impl("head", _autograd, "Autograd")
torch.library.register_fake("dcnet::head", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("dcnet::head_backward", _backward_shapes, lib=_LIBRARY)
