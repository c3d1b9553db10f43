"""f(w, x) as stateless functions, which the layers call."""

from typing import Unpack

from torch import Tensor

from dcnet import kernels
from dcnet.eager import ConvPatches, LinearPatches, Options, Size, decoupled
from dcnet.norms import filter_norm, patch_norm, vector_norm

__all__ = [
    "Options",
    "decoupled_conv1d",
    "decoupled_conv2d",
    "decoupled_conv3d",
    "decoupled_linear",
    "filter_norm",
    "patch_norm",
    "vector_norm",
]


def decoupled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """f(w, x) = h(||w||, ||x||) * g(theta) + bias for every row and every filter: [..., in] -> [..., out]."""
    return decoupled(LinearPatches(input, weight), weight, bias, options)


def decoupled_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) for every patch of a sequence, [N, C, L] or [C, L]; see `decoupled_conv2d`."""
    return decoupled(ConvPatches(1, input, weight, stride, padding, dilation, groups), weight, bias, options)


def decoupled_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) = h(||w||, ||x||) * g(theta) + bias for every patch x and every filter w (Eq. 3).

    Arguments and shapes are those of `torch.nn.functional.conv2d`; the operator and its state are keyword arguments,
    see `Options`.
    """
    given = (input, weight, bias, stride, padding, dilation, groups, options)
    known = kernels.find_known(*given)
    if known is not None or kernels.fits(input, weight, bias, padding, groups, options):
        return kernels.conv2d(*given, known)
    return decoupled(ConvPatches(2, input, weight, stride, padding, dilation, groups), weight, bias, options)


def decoupled_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[Options],
) -> Tensor:
    """f(w, x) for every patch of a volume, [N, C, D, H, W] or [C, D, H, W]; see `decoupled_conv2d`."""
    return decoupled(ConvPatches(3, input, weight, stride, padding, dilation, groups), weight, bias, options)
