"""f(w, x) as stateless functions, which the layers call."""

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor

from dcnet import kernels
from dcnet.attention import attend
from dcnet.attention_inputs import Settings
from dcnet.eager import ConvPatches, LinearPatches, Options, Size, decoupled
from dcnet.norms import filter_norm, patch_norm, vector_norm
from dcnet.operator import Operator

__all__ = [
    "Options",
    "decoupled_attention",
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
    output = kernels.linear(input, weight, bias, options)
    return decoupled(LinearPatches(input, weight), weight, bias, options) if output is None else output


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
    window = (stride, padding, dilation, groups)
    output = kernels.conv1d(input, weight, bias, *window, options)
    return decoupled(ConvPatches(1, input, weight, *window), weight, bias, options) if output is None else output


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


def decoupled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    operator: Operator | str,
    eps: float = 1e-4,
    constants: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """softmax(scale * f(k, q) + mask) v with f(k, q) = h(||k||, ||q||) * g(theta): keys are filters, queries patches.

    Arguments up to `enable_gqa` and shapes are those of `torch.nn.functional.scaled_dot_product_attention`, which
    computes operators that are inner products of scaled queries and keys: those with the angle cos, but for joint
    weighting. Others take memory for all scores.

    Args:
        query: [..., heads, L, E].
        key: [..., heads, S, E]; with `enable_gqa`, its heads divide those of the query.
        value: [..., heads, S, Ev].
        attn_mask: bool, True where a query attends, or numbers to add to the scores.
        dropout_p: the probability of dropping an attention weight; applied always, as in torch.
        is_causal: let query i attend to keys 0 to i only.
        scale: None for sqrt(E) if f has a bound, 1 if it grows with the norm of query or key, and torch's 1 / sqrt(E)
            if it grows with both: scores of queries and keys with entries of variance 1 are then about 1.
        enable_gqa: repeat the heads of key and value to match those of the query.
        operator: an Operator or its spec, without a relative radius.
        eps: added under the square root of ||q|| and ||k||.
        constants: the learned constants by name, as `dcnet.DecoupledAttention` stores them: one number, or one per
            head of the query.
    """
    settings = Settings(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend(query, key, value, settings, operator, eps, constants)
