"""The forms in which an operator is timed: the library's layer and the naive formulation, each as is and compiled."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcnet.bench.images import placed
from dcnet.bench.naive import naive_conv2d
from dcnet.bench.shapes import Shape
from dcnet.layers import DecoupledConv2d, conv2d
from dcnet.operator import PLAIN


@dataclass(frozen=True)
class Case:
    """One layer in one of its forms.

    The gradients of a naive formulation in half precision are no worse than what it is: they are noted, not judged.
    """

    variant: str
    layer: nn.Conv2d
    call: Callable[[Tensor], Tensor]

    @property
    def judged_by_gradients(self) -> bool:
        return not self.variant.startswith("naive")


def make_case(variant: str, operator: str, shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """The variant of the operator, with filters that depend on the shape alone."""
    layer = make_layer(PLAIN if variant == PLAIN else operator, shape, dtype, device)
    call: Callable[[Tensor], Tensor] = layer
    if variant.startswith("naive"):
        call = _naive(layer)
    if variant.endswith("compiled"):
        # Not dynamic: what was compiled for the batch of the check would be slower for the batch that is timed.
        call = torch.compile(call, fullgraph=True, dynamic=False)
    return Case(variant, layer, call)


def _naive(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    assert isinstance(layer, DecoupledConv2d)

    def call(x: Tensor) -> Tensor:
        return naive_conv2d(layer, x)

    return call


def make_layer(operator: str, shape: Shape, dtype: torch.dtype, device: str) -> nn.Conv2d:
    torch.manual_seed(0)
    sizes = (shape.channels, shape.channels, shape.kernel)
    layer = conv2d(*sizes, padding=shape.kernel // 2, bias=False, operator=operator)
    return placed(layer, device, dtype)
