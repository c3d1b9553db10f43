"""Convolutions that ran before, found by the signature of a call: a second call skips the checks of the first one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.eager import Options
from dcnet.kernels.convolution import MOST_COMPILED, Call, Convolution
from dcnet.kernels.depthwise import Depthwise
from dcnet.operator import REGISTRIES, Operator

# Types of tensors without behavior of their own.
PLAIN = (Tensor, torch.nn.Parameter)

Signature = tuple[Any, ...]


class Known(NamedTuple):
    """What a signature determines: the compiled convolution, and the settings of its calls.

    `operator` is part of the signature by its identity; it is kept here, so that no other object gets the same one.
    """

    operator: Operator
    fused: Convolution | Depthwise
    names: tuple[str, ...]
    cast: torch.dtype | None
    settings: tuple[Any, ...]

    def call(self, x: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Call:
        """The call with new tensors of the same signature."""
        given = options.get("constants") or {}
        x = x if self.cast is None else x.to(self.cast)
        running = options.get("mean_norm")
        tracked = None if running is None else options.get("num_batches_tracked")
        return Call(x, w, bias, [given[name] for name in self.names], running, tracked, *self.settings)


_known: dict[Signature, Known] = {}


def signature(x: Tensor, w: Tensor, bias: Tensor | None, window: Sequence[Any], options: Options) -> Signature | None:
    """Everything that the choice of kernels and their arguments depend on; None if the checks are always needed.

    It has dtype, device, shape and strides of every tensor, so that it does not matter how a layer got its tensors. It
    does not have `torch.is_grad_enabled` and `requires_grad`, which every call reads.
    """
    if list in [type(size) for size in window]:
        # A list has no hash.
        return None
    op, given = options.get("operator"), options.get("constants") or {}
    if type(op) is not Operator or options.get("sync") is not None or x.is_nested or x.layout is not torch.strided:
        return None
    running, tracked, eps = options.get("mean_norm"), options.get("num_batches_tracked"), options.get("eps")
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    tensors = parts_of((x, w, bias, running, tracked, *given.values()))
    if tensors is None:
        return None
    changes = [registry.changes for registry in REGISTRIES]
    return (id(op), cast, eps, options.get("training"), *window, *options, *given, *changes, *tensors)


def parts_of(tensors: Iterable[Tensor | None]) -> list[Any] | None:
    """Dtype, device, shape and strides of every tensor; None if one of them is of a subclass."""
    parts: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
        elif type(tensor) in PLAIN:
            parts += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        else:
            return None
    return parts


def recall(key: Signature | None) -> Known | None:
    """What is known about calls of this signature."""
    return _known.get(key) if key is not None else None


def remember(key: Signature | None, known: Known) -> None:
    """Stores the result of the checks of a first call, if it is valid for all calls of the signature."""
    if key is None:
        return
    while len(_known) >= MOST_COMPILED:
        _known.pop(next(iter(_known)))
    _known[key] = known
