"""Fused blocks that ran before, found by the signature of a call, as `known_calls.py` finds convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dcnet.eager import Options
from dcnet.kernels.block_autograd import BlockCall
from dcnet.kernels.block_passes import BlockSettings
from dcnet.kernels.convolution import MOST_COMPILED, Call
from dcnet.kernels.fused_block import Extras, FusedBlock
from dcnet.kernels.known_calls import Signature, parts_of, signature

if TYPE_CHECKING:
    from dcnet.kernels.block_dispatch import ConvLayer

# The parameters and buffers of a norm that a block reads.
PARAMETERS, BUFFERS = ("weight", "bias"), ("running_mean", "running_var", "num_batches_tracked")


class Given(NamedTuple):
    """The inputs and modules of a block, with the options of its layer and the tensors besides those of its layer."""

    x: Tensor
    layer: ConvLayer
    options: Options
    extras: Extras
    modules: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        x: Tensor,
        squares: Tensor | None,
        layer: ConvLayer,
        norm: nn.BatchNorm2d | None,
        activation: nn.Module | None,
        residual: Tensor | None,
        hands_on: bool,
    ) -> Given | None:
        """None if a norm has parameters that torch computes from others."""
        slopes = activation.weight if type(activation) is nn.PReLU else None
        kind = type(activation)
        if norm is None:
            extras = Extras(squares=squares, prelu=slopes, residual=residual)
            return cls(x, layer, layer.options(), extras, (kind, hands_on))
        own, buffers = norm._parameters, norm._buffers
        if not (own.keys() >= set(PARAMETERS) and buffers.keys() >= set(BUFFERS)):
            return None
        tensors = (own["weight"], own["bias"], slopes, residual, *[buffers[name] for name in BUFFERS])
        numbers = (norm.training, norm.track_running_stats, norm.eps, norm.momentum, norm.num_features)
        return cls(x, layer, layer.options(), Extras(squares, *tensors), (kind, hands_on, *numbers))

    def signature(self) -> Signature | None:
        """Everything that the choice of kernels and their arguments depend on; None if the checks are always needed."""
        layer = self.layer
        window = (layer.stride, layer.padding, layer.dilation, layer.groups)
        first = signature(self.x, layer.weight, layer.bias, window, self.options)
        others = None if first is None else parts_of(self.extras)
        return None if others is None else (first, *others, *self.modules)


class KnownBlock(NamedTuple):
    """What a signature determines: the compiled block, and the settings of its calls.

    `operator` is part of the signature by its identity; it is kept here, so that no other object gets the same one.
    """

    operator: Any
    fused: FusedBlock
    names: tuple[str, ...]
    cast: torch.dtype | None
    numbers: tuple[Any, ...]
    settings: BlockSettings

    def call(self, given: Given) -> BlockCall:
        """The call with new tensors of the same signature."""
        options, layer, extras = given.options, given.layer, given.extras
        constants = options.get("constants") or {}
        running = options.get("mean_norm")
        tracked = None if running is None else options.get("num_batches_tracked")
        x = given.x if self.cast is None else given.x.to(self.cast)
        extras = extras if self.settings.given or extras.squares is None else extras._replace(squares=None)
        stored = [constants[name] for name in self.names]
        call = Call(x, layer.weight, layer.bias, stored, running, tracked, *self.numbers)
        return BlockCall(call, extras, self.settings)


_known: dict[Signature, KnownBlock] = {}


def recall(key: Signature | None) -> KnownBlock | None:
    """What is known about calls of this signature."""
    return None if key is None else _known.get(key)


def remember(key: Signature, operator: Any, call: BlockCall, cast: torch.dtype | None) -> None:
    """Stores the result of the checks of a first call."""
    while len(_known) >= MOST_COMPILED:
        _known.pop(next(iter(_known)))
    fused, numbers = call.fused(in_place=True), tuple(call.call[6:])
    _known[key] = KnownBlock(operator, fused, tuple(operator.learned), cast, numbers, call.settings)
