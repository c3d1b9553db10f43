"""The inference of folded layers as an operation of torch, for compilers; it has no gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from dcnet.kernels.folded import folded_conv2d
from dcnet.kernels.plan import Window

_LIBRARY = Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    "folded_conv2d(Tensor x, Tensor filters, Tensor? bias, Tensor table, str operator, float eps, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    x: Tensor, filters: Tensor, bias: Tensor | None, table: Tensor, operator: str, eps: float, *window: Any
) -> Tensor:
    return folded_conv2d(x, filters, bias, table, operator, eps, window)


def _shape(
    x: Tensor, filters: Tensor, bias: Tensor | None, table: Tensor, operator: str, eps: float, *window: Any
) -> Tensor:
    given = Window.of(x, filters, *window)
    size = (given.batch, given.filters, *given.out)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=given.format)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("folded_conv2d", _run, _key)
torch.library.register_fake("dcnet::folded_conv2d", _shape, lib=_LIBRARY)
