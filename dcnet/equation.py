"""f(w, x) = h(||w||, ||x||) * g(theta) in plain torch, for any way in which filters meet patches."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dcnet.meeting import Meeting, Size, convolve
from dcnet.norms import accumulation_dtype, filter_norm, within_range
from dcnet.operator import Operator, as_operator
from dcnet.part import Value


@dataclass(frozen=True)
class Processes:
    """The processes of a group of torch.distributed whose batches count as one; all there are without a group."""

    group: Any = None

    @property
    def several(self) -> bool:
        """Whether there are others to share with."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def __deepcopy__(self, memo: Any) -> "Processes":
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(f"{self.group!r} cannot be pickled: pickle the state_dict of a model that names its group")
        return dict(vars(self))


class Options(TypedDict, total=False):
    """What every function of `dcnet.functional` takes by name beside torch's own arguments.

    operator: an Operator or its spec.
    eps: added under the square root of both norms.
    constants: what a layer has learned, by name and as it stores it; without it the constants are as they start.
    mean_norm: the running mean norm of a relative radius; without it the batch's own mean is used.
    num_batches_tracked: the batches in `mean_norm`, as an integer tensor; with it the decay of the running mean warms
        up, see `warmed_up`.
    training: use the batch's own mean norm, with its gradient, and update `mean_norm` and its count in place.
    sync: the processes whose batches count as one where the batch's own mean norm is used; see `dcnet.sync_norms`.
    """

    operator: Required[Operator | str]
    eps: float
    constants: Mapping[str, Tensor] | None
    mean_norm: Tensor | None
    num_batches_tracked: Tensor | None
    training: bool
    sync: Processes | None


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    **options: Unpack[Options],
) -> Tensor:
    """`dcnet.functional.decoupled_conv2d` by torch alone."""
    combine = functools.partial(decoupled, weight, bias, options=options)
    return convolve(F.conv2d, input, weight, stride, padding, dilation, groups, combine)


def decoupled(weight: Tensor, bias: Tensor | None, at: Meeting, options: Options) -> Tensor:
    """f(w, x) + bias of all filters and all that they meet."""
    op, eps = check_options(options), options.get("eps", 1e-4)
    _check_bias(bias, weight)
    constants = _constants(op, options.get("constants") or {}, weight, at)
    w_norm = at.spread(filter_norm(weight, eps))
    factor = op.weighting.factor(w_norm, lambda norm: op.h(norm, constants), op.alpha(constants))
    # g(<w, x> / ||w||) (h / n) factor: what depends on w alone goes into the filters, if g lets it through.
    on_filters, on_output = 1 / w_norm, factor
    if op.angle.homogeneous and op.weighting.multiplies:
        on_filters, on_output = torch.ones_like(w_norm), 1.0
    elif op.angle.homogeneous and (op.weighting.nonnegative or op.angle.identity):
        on_filters, on_output = on_filters * factor, 1.0

    cancels = norm_cancels(op)
    if cancels and op.angle.identity:
        h = op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), constants)
        return at.multiply(scaled(weight, on_filters * h), bias)
    product = at.multiply(scaled(weight, on_filters), None)
    n = torch.ones_like(w_norm[:1]) if cancels else at.norm(eps)
    # Everything that depends on n alone is formed on its one channel before it meets those of the product.
    h = op.h(op.weighting.argument(w_norm, n), relative_to_mean(op, constants, n, options))
    h = h * on_output if isinstance(on_output, Tensor) else h
    # By a product, whose gradient takes fewer passes over all channels than that of a quotient.
    product, inverse = (product, n) if cancels else within_range(product, n)
    if op.angle.homogeneous:
        return at.finish(op.g(product, constants), h * inverse, bias, product.dtype)
    return at.finish(op.g(product * inverse, constants), h, bias, product.dtype)


def check_options(options: Options) -> Operator:
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unknown option {name!r}: known are {', '.join(Options.__annotations__)}")
    if "operator" not in options:
        raise TypeError("operator is missing: give an Operator or a spec, as in operator='tanh-cos'")
    op = as_operator(options["operator"])
    learned = op.learned
    for name in options.get("constants") or {}:
        if name not in learned:
            raise ValueError(f"{str(op)!r} learns no constant {name!r}, only {', '.join(learned) or 'none'}")
    if not options.get("eps", 0) >= 0:
        raise ValueError(f"eps must not be negative, not {options['eps']!r}")
    return op


def _check_bias(bias: Tensor | None, weight: Tensor) -> None:
    """Refuses what torch's convolutions refuse; torch spreads the bias of rows, and so it is spread here."""
    if bias is not None and weight.dim() > 2 and bias.shape != weight.shape[:1]:
        filters = list(weight.shape[:1])
        raise ValueError(f"bias of shape {list(bias.shape)} must have the shape {filters}, one number for each filter")


def norm_cancels(op: Operator) -> bool:
    """Whether h is alpha n and g passes a factor through: any n gives the same result then, and 1 costs nothing."""
    return op.angle.homogeneous and all(part.proportional for part in op.magnitude.parts)


def _constants(op: Operator, stored: Mapping[str, Tensor], weight: Tensor, at: Meeting) -> dict[str, Value]:
    """Every constant in float32 or better, those per filter in the shape in which they meet the patches."""
    dtype = accumulation_dtype(weight.dtype)
    values = op.constants({name: tensor.to(dtype) for name, tensor in stored.items()})
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = at.spread(value) if op.slots[name].size == 1 else value.to(weight.device, dtype)
    return values


def relative_to_mean(op: Operator, constants: dict[str, Value], n: Tensor, options: Options) -> dict[str, Value]:
    """The constants with every relative radius multiplied by the mean norm."""
    if op.decay is None:
        return constants
    mean = _mean_norm(n, options, op.decay)
    return {name: value * mean if op.slots[name].relative else value for name, value in constants.items()}


def _mean_norm(n: Tensor, options: Options, decay: float) -> Tensor:
    """The running mean of ||x|| in evaluation, otherwise the batch's own, which then enters the running mean."""
    running = options.get("mean_norm")
    if running is not None and not options.get("training", False):
        # Zero means that no batch was seen yet; a patch norm is never zero.
        return torch.where(running > 0, running, torch.ones_like(running)).to(n.dtype)
    mean = _batch_mean(n, sharing(options))
    if running is not None:
        _update_mean(running, options.get("num_batches_tracked"), mean.detach().to(running.dtype), decay)
    # The mean of nothing is 0, whose reciprocal would make gradients of zero times infinity.
    return mean + 1 if n.numel() == 0 else mean


def sharing(options: Options) -> Processes | None:
    """The processes that share the mean norm of their batches; None if it is the own one, or the running one."""
    sync, running = options.get("sync"), options.get("mean_norm")
    if sync is None or (running is not None and not options.get("training", False)):
        return None
    return sync if sync.several else None


def _batch_mean(n: Tensor, shared: Processes | None) -> Tensor:
    if shared is None:
        return n.sum() / max(n.numel(), 1)
    # Both sums, since not all processes need have the same number of patches.
    total, count = _SumOverProcesses.apply(torch.stack((n.sum(), n.new_full((), n.numel()))), shared.group)
    return total / count.clamp(min=1)


class _SumOverProcesses(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs, since the loss of each depends on every term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        # Detached, since torch 2.11 compiles what is returned as it was changed in place without a gradient.
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _SumOverProcesses.apply(gradients[0].contiguous(), ctx.group), None


def _update_mean(running: Tensor, count: Tensor | None, mean: Tensor, decay: float) -> None:
    """The first batch's mean, then decay * running + (1 - decay) * mean; empty or non-finite batches leave no trace."""
    started, usable = running > 0, mean.isfinite() & (mean > 0)
    share: Value = decay
    if count is not None:
        # A mean norm that was set to zero starts over, whatever its count.
        seen = torch.where(started, count, 0)
        share = warmed_up(decay, seen.to(running.dtype))
        _write(count, torch.where(usable, seen + 1, count))
    updated = torch.where(started, share * running + (1 - share) * mean, mean)
    _write(running, torch.where(usable, updated, running))


def warmed_up(decay: float, count: Tensor) -> Tensor:
    """min(decay, (1 + t) / (10 + t)) after t batches: early on, the running mean covers about the last tenth of them.

    With the decay of 0.999 alone it would hold 37 % of its first batch after 1,000 steps, when the network was not yet
    trained. From step 8,990 on the two are the same.
    """
    return ((1 + count) / (10 + count)).clamp(max=decay)


def settled_count(decay: float) -> int:
    """The number of batches after which the decay is no longer warming up."""
    return max(math.ceil((10 * decay - 1) / (1 - decay)), 0)


def _write(buffer: Tensor, value: Tensor) -> None:
    # By a view, since torch.compile loses what is written into a number in float64.
    buffer.view(1).copy_(value)


def scaled(weight: Tensor, factor: Tensor) -> Tensor:
    return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
