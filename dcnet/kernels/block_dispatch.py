"""Decides which blocks of a network run as fused blocks, and calls them; all others run module by module."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from dcnet.device_functions import AVAILABLE
from dcnet.eager import Options
from dcnet.kernels import dispatch
from dcnet.kernels.activations import code_of, follows_residual
from dcnet.kernels.convolution import mean_kind
from dcnet.kernels.passes import BATCH_MEAN, IN_PLACE, NO_UPDATE
from dcnet.kernels.plan import has_device_functions
from dcnet.operator import Operator

if AVAILABLE:
    from dcnet.kernels.block_autograd import BlockCall, apply_block, arguments_of
    from dcnet.kernels.block_passes import (
        BATCH_NORM,
        NO_NORM,
        RUNNING_NORM,
        UPDATED,
        BlockSettings,
    )
    from dcnet.kernels.convolution import Call
    from dcnet.kernels.folded_inference import folded_block
    from dcnet.kernels.fused_block import Extras, FusedBlock
    from dcnet.kernels.known_blocks import Given, KnownBlock, recall, remember


class ConvLayer(Protocol):
    """A decoupled convolution, as `dcnet.DecoupledConv2d`."""

    weight: Tensor
    bias: Any
    operator: Operator
    eps: float
    stride: Any
    padding: Any
    dilation: Any
    groups: int

    def options(self) -> Options: ...


class FoldedLayer(Protocol):
    """A folded convolution, as `dcnet.inference.folded_layers.FoldedConv`."""

    is_folded: bool
    is_weighted: bool
    weight: Tensor
    bias: Tensor | None
    operator: Operator
    eps: float
    window: Any

    def table(self) -> Tensor: ...
    def rows(self, prelu: Tensor | None) -> Tensor | None: ...


def is_folded(layer: ConvLayer | FoldedLayer) -> TypeGuard[FoldedLayer]:
    return getattr(layer, "is_folded", False)


def uses_blocks(x: Any) -> bool:
    """Whether a network with this input may run fused blocks at all."""
    return dispatch.enabled() and isinstance(x, Tensor) and x.is_cuda and not dispatch.is_traced()


def fits_block(
    x: Tensor,
    squares: Tensor | None,
    layer: ConvLayer | FoldedLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
) -> bool:
    """Whether the kernels support activation(norm(layer(x)) + residual) for these tensors and modes."""
    if is_folded(layer):
        return _fits_folded(x, squares, layer, norm, activation, residual)
    return _fits_layer(x, squares, cast("ConvLayer", layer), norm, activation, residual)


def _fits_layer(
    x: Tensor,
    squares: Tensor | None,
    layer: ConvLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
) -> bool:
    if layer.groups != 1 or not has_device_functions(layer.operator):
        return False
    if residual is not None and not follows_residual(activation):
        return False
    if not dispatch.fits(x, layer.weight, layer.bias, layer.padding, 1, layer.options()):
        return False
    tensors: list[Tensor] = [] if activation is None else list(activation.parameters())
    if norm is not None:
        if not _fits_norm(norm):
            return False
        own = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        tensors += [tensor for tensor in own if tensor is not None]
    fitting = all(t.is_cuda and t.dtype in dispatch.DTYPES and t.is_contiguous() for t in tensors)
    return fitting and _fits_output(x, squares, layer, norm, residual)


def _fits_norm(norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels support this kind of normalization: with weight and bias or neither, and a fixed momentum."""
    if (norm.weight is None) != (norm.bias is None):
        return False
    if not isinstance(norm.momentum, int | float | None):
        return False
    return norm.num_batches_tracked is not None or not _updates(norm)


def _fits_folded(
    x: Tensor,
    squares: Tensor | None,
    layer: FoldedLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
) -> bool:
    stride, padding, dilation, groups = layer.window
    if norm is not None or groups != 1 or (residual is not None and not follows_residual(activation)):
        return False
    if not dispatch.fits_folded(x, layer.weight, layer.bias, layer.operator, padding, groups):
        return False
    tensors = [residual, *([] if activation is None else activation.parameters())]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    return _fits_output(x, squares, _Window(layer.weight, stride, padding, dilation), None, residual)


class _Window(NamedTuple):
    """The filters and the window of a convolution."""

    weight: Tensor
    stride: Any
    padding: Any
    dilation: Any


def _fits_output(
    x: Tensor, squares: Tensor | None, layer: ConvLayer | _Window, norm: nn.BatchNorm2d | None, residual: Tensor | None
) -> bool:
    shape = _output_shape(x, layer)
    # The kernels of blocks do not divide channels into slices.
    if min(shape) < 1 or shape[1] > dispatch.MOST_CHANNELS or (norm is not None and norm.num_features != shape[1]):
        return False
    # torch raises an error for statistics of a single value.
    if norm is not None and _uses_batch(norm) and shape[0] * shape[2] * shape[3] < 2:
        return False
    if residual is not None and (residual.shape != shape or residual.dtype != _dtype(x) or not residual.is_cuda):
        return False
    return squares is None or (squares.shape == (x.shape[0], *x.shape[2:]) and squares.dtype == torch.float32)


def _output_shape(x: Tensor, layer: ConvLayer | _Window) -> tuple[int, ...]:
    steps, pads, gaps = dispatch.sizes(layer.weight, layer.stride, layer.padding, layer.dilation)
    sides = [
        (size + 2 * pad - gap * (side - 1) - 1) // step + 1
        for size, side, step, pad, gap in zip(x.shape[2:], layer.weight.shape[2:], steps, pads, gaps, strict=True)
    ]
    return x.shape[0], layer.weight.shape[0], *sides


def _dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether the normalization uses the statistics of the batch."""
    return norm.training or (norm.running_mean is None and norm.running_var is None)


def _updates(norm: nn.BatchNorm2d) -> bool:
    """Whether the normalization updates its running statistics."""
    return norm.training and norm.track_running_stats and norm.running_mean is not None


def block(
    x: Tensor,
    squares: Tensor | None,
    layer: ConvLayer | FoldedLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
    hands_on: bool,
    known: tuple[KnownBlock, Given] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """activation(norm(layer(x)) + residual), its sums of squares over channels with `hands_on`, and the output again.

    The squares are [N, H, W] in float32. If the output has two users, the second one should take the last result: its
    gradient is then added in the backward pass of the block, without a pass of its own. Also updates the running
    statistics of layer and norm. Call it only if `fits_block` is true.

    Args:
        squares: the sums of squares of x, if the block that computed x handed them on.
        known: the result of `find_known_block`, with which the call skips all checks.
    """
    if known is not None:
        found, same = known
        return _run(found.fused, found.call(same))
    if is_folded(layer):
        return _folded(x, squares, layer, activation, residual, hands_on)
    modules = (cast("ConvLayer", layer), norm, activation, residual, hands_on)
    given = _call(x, squares, *modules)
    if not dispatch.is_plain_eager(x):
        return _compiled(given, norm)
    to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    given = given if to is None else given._replace(call=given.call._replace(x=x.to(to)))
    described = Given.of(x, squares, *modules)
    if described is not None and (key := described.signature()) is not None:
        remember(key, modules[0].operator, given, to)
    return _run(given.fused(in_place=True), given)


def _run(fused: FusedBlock, given: BlockCall) -> tuple[Tensor, Tensor | None, Tensor]:
    if dispatch.needs_gradient(given.tensors):
        found: tuple[Tensor, Tensor | None, Tensor] = apply_block(fused, given.others, *given.tensors)
        return found
    output, onward, *_ = fused.block_forward(given.call, given.extras, overwrite=True)
    return output, onward, output


def find_known_block(
    x: Tensor,
    squares: Tensor | None,
    layer: ConvLayer | FoldedLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
    hands_on: bool,
) -> tuple[KnownBlock, Given] | None:
    """What `block` found out in an earlier call with the same signature, in plain eager mode; it fitted then."""
    if torch.compiler.is_compiling() or not uses_blocks(x) or is_folded(layer) or not dispatch.is_plain_eager(x):
        return None
    given = Given.of(x, squares, cast("ConvLayer", layer), norm, activation, residual, hands_on)
    known = None if given is None else recall(given.signature())
    return None if given is None or known is None else (known, given)


def _folded(
    x: Tensor,
    squares: Tensor | None,
    layer: FoldedLayer,
    activation: nn.Module | None,
    residual: Tensor | None,
    hands_on: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The block of a folded layer."""
    prelu = activation.weight if isinstance(activation, nn.PReLU) else None
    window = dispatch.sizes(layer.weight, *layer.window[:3])
    given = (x, squares, layer.weight, layer.table(), layer.rows(prelu), residual)
    run = folded_block if dispatch.is_plain_eager(x) else torch.ops.dcnet.folded_block.default
    settings = (layer.is_weighted, str(layer.operator), layer.eps, *window, code_of(activation), hands_on)
    output, onward = run(*given, *settings)
    return output, onward if hands_on else None, output


def _compiled(given: BlockCall, norm: nn.BatchNorm2d | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The block as a custom operation, followed by the updates of the running statistics."""
    call, extras, settings = given
    if settings.update != NO_UPDATE and extras.batches is not None:
        extras.batches.add_(1)
    output, onward, *_, updated = torch.ops.dcnet.block.default(*arguments_of(given))
    if call.mean == BATCH_MEAN and call.running is not None:
        call.running.copy_(updated[1])
        if call.tracked is not None:
            call.tracked.copy_(updated[2])
    if settings.update != NO_UPDATE and norm is not None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(updated[UPDATED : UPDATED + norm.num_features])
        norm.running_var.copy_(updated[UPDATED + norm.num_features :])
    return output, onward if settings.hands_on else None, output


def _call(
    x: Tensor,
    squares: Tensor | None,
    layer: ConvLayer,
    norm: nn.BatchNorm2d | None,
    activation: nn.Module | None,
    residual: Tensor | None,
    hands_on: bool,
) -> BlockCall:
    options, op = layer.options(), layer.operator
    # A layer whose patch norm cancels needs no squares.
    squares = None if op.norm_cancels else squares
    running = options.get("mean_norm")
    mean = mean_kind(op.decay, running, options.get("training", False))
    tracked = options.get("num_batches_tracked") if running is not None else None
    window = dispatch.sizes(layer.weight, layer.stride, layer.padding, layer.dilation)
    constants = dispatch.stored(op, options, layer.weight)
    call = Call(x, layer.weight, layer.bias, constants, running, tracked, str(op), layer.eps, *window, 1, mean)
    prelu = activation.weight if isinstance(activation, nn.PReLU) else None
    settings = BlockSettings(
        **_norm_settings(norm),
        bias=layer.bias is not None,
        activation=code_of(activation),
        shared=prelu is not None and prelu.numel() == 1 and layer.weight.shape[0] != 1,
        residual=residual is not None,
        given=squares is not None,
        hands_on=hands_on,
    )
    return BlockCall(call, Extras(squares=squares, prelu=prelu, residual=residual, **_norm_tensors(norm)), settings)


def _norm_settings(norm: nn.BatchNorm2d | None) -> dict[str, Any]:
    if norm is None:
        return {"norm": NO_NORM}
    return {
        "norm": BATCH_NORM if _uses_batch(norm) else RUNNING_NORM,
        "eps": norm.eps,
        "momentum": norm.momentum,
        "update": IN_PLACE if _updates(norm) else NO_UPDATE,
        "affine": norm.weight is not None,
    }


def _norm_tensors(norm: nn.BatchNorm2d | None) -> dict[str, Tensor | None]:
    if norm is None:
        return {}
    tensors = {"gamma": norm.weight, "beta": norm.bias, "batches": norm.num_batches_tracked}
    return {**tensors, "running_mean": norm.running_mean, "running_var": norm.running_var}
