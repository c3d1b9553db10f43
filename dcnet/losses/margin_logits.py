"""A margin as a plain function of cosines, labels and norms, for code with its own weights and loss."""

import math

import torch
from torch import Tensor

from dcnet.checks import check_number, check_tensor
from dcnet.losses.margins import Batch, Margin, State, as_margin, nearest_centers


def apply_margin(
    cosines: Tensor,
    labels: Tensor,
    margin: Margin | str,
    norms: Tensor | None = None,
    scale: float | None = None,
    state: State | None = None,
    interclass_filtering_threshold: float | None = None,
) -> Tensor:
    """The logits [N, C] with the margin, for `torch.nn.functional.cross_entropy`.

    A negative label means that the class is not among the C, as in a shard of PartialFC: no logit of the sample has the
    margin of the label. Logits of binary margins lack the threshold.

    Args:
        cosines: cosines [N, C] of features and class weights; [N, C * k] for k centers per class, with those
            of a class adjacent.
        labels: integers [N] from 0 to C - 1, or negative.
        margin: a spec such as "adaface" or "arcface(m=0.3)", or a `Margin`.
        norms: the norms [N] of the features, for margins and scales that depend on them.
        scale: the scale s; None for the margin's default, which may be the norm.
        state: the state of the margin over batches, such as AdaFace's running statistics: a dict from
            `as_margin(margin).first_state()`, moved to the device; it is updated in place. None uses the statistics of
            this batch alone, and draws random margins from torch's generator.
        interclass_filtering_threshold: as in `MarginSoftmax`.
    """
    margin = as_margin(margin)
    # All checks come first, since a call that raises must not change the state.
    _check(cosines, labels, margin, norms, scale)
    if interclass_filtering_threshold is not None:
        check_number("interclass_filtering_threshold", interclass_filtering_threshold, above=0, most=1)
    _check_state(state or {})
    cosines = cosines if cosines.dtype == torch.float64 else cosines.float()
    cos, kept = nearest_centers(cosines, margin.centers()), labels >= 0
    places = labels.long().clamp(min=0)
    own = cos.gather(1, places[:, None])[:, 0]
    size = cos.new_ones(len(cos)) if norms is None else norms.to(cos.dtype)
    batch = _next_batch(margin, own.detach() * kept, size, kept, state)
    logits = _scaled(margin.others_in(cos, batch), margin, size, scale)
    if interclass_filtering_threshold is not None:
        logits = logits.masked_fill(cos.detach() > interclass_filtering_threshold, -math.inf)
    target = _scaled(margin.target_in(own, batch)[:, None], margin, size, scale)
    is_label = (torch.arange(cos.shape[1], device=cos.device) == places[:, None]) & kept[:, None]
    return torch.where(is_label, target, logits)


def _check(cosines: Tensor, labels: Tensor, margin: Margin, norms: Tensor | None, scale: float | None) -> None:
    for name, value in (("cosines", cosines), ("labels", labels)):
        check_tensor(name, value)
    centers = margin.centers()
    if cosines.dim() != 2 or labels.shape != cosines.shape[:1] or cosines.shape[1] % centers or not cosines.shape[1]:
        wanted = "[N, C]" if centers == 1 else f"[N, C * {centers}]"
        shapes = f"{list(cosines.shape)} and {list(labels.shape)}"
        raise ValueError(f"apply_margin needs cosines {wanted}, C > 0, and labels [N], not {shapes}")
    _check_labels(labels, cosines.shape[1] // centers)
    if not margin.unit_weights:
        raise ValueError(f"margin {margin.name!r} depends on the norms of the weights: use MarginSoftmax")
    if scale is not None:
        check_number("scale", scale, above=0)
    if norms is None and (margin.uses_norms or (margin.scale is None and scale is None)):
        raise ValueError(f"margin {margin.name!r} needs the norms of the features: give norms=features.norm(dim=1)")
    if norms is not None:
        check_tensor("norms", norms)
        if norms.shape != labels.shape:
            raise ValueError(f"norms must be {list(labels.shape)}, one per sample, not {list(norms.shape)}")


def _check_state(state: State) -> None:
    for name, value in state.items():
        check_tensor(f"the state {name!r} of a margin", value)
        if value.dim():
            raise ValueError(f"the state {name!r} of a margin must be a tensor [], not {list(value.shape)}")


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, not {labels.dtype}")
    # On a GPU, testing the values would synchronize with the host.
    if labels.is_cuda or torch.compiler.is_compiling() or not len(labels):
        return
    if (highest := int(labels.max())) >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}, or negative, not {highest}")


@torch.no_grad()
def _next_batch(margin: Margin, own: Tensor, norms: Tensor, kept: Tensor, state: State | None) -> Batch:
    """The batch with the state of the margin after it; a given state is updated."""
    first = {name: value.to(own.device) for name, value in margin.first_state().items()} if state is None else state
    learner = margin.of_one_batch() if state is None else margin
    try:
        values = learner.next_state(Batch(own, norms, kept, first))
    except KeyError as error:
        first_state = f"as_margin({str(margin)!r}).first_state()"
        raise ValueError(f"the state of margin {margin.name!r} must have {error}: start with {first_state}") from None
    if state is not None:
        for name, value in values.items():
            state[name].copy_(value)
    return Batch(own, norms, kept, values)


def _scaled(cos: Tensor, margin: Margin, norms: Tensor, scale: float | None) -> Tensor:
    """s times the cosines [N, ...]; s is the norm if the margin has no default."""
    fixed = margin.scale if scale is None else scale
    return cos * (norms[:, None] if fixed is None else fixed)
