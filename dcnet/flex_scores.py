"""Attention with scores of the angle alone, by torch's flex_attention, which never stores them: compiled, on a GPU.

Other operators store all scores. In flex_attention, their norms and learned constants would be tensors that the score
function reads. Every score would add to their gradients by an atomic addition, and compilers for the CPU do not support
computed tensors there at all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dcnet.magnitude import Sphere
from dcnet.norms import HALF_PRECISIONS, vector_norm
from dcnet.operator import Operator

if TYPE_CHECKING:
    from dcnet.attention import Score
    from dcnet.attention_inputs import Settings

# Off by default: the kernels have not been tested and timed on a GPU yet.
ENABLED = os.environ.get("DCNET_FLEX", "off") == "on"
# The kernels multiply matrices of at least 16 columns.
LEAST_FEATURES = 16
DTYPES = (*HALF_PRECISIONS, torch.float32)


def compiles_for_gpu(query: Tensor) -> bool:
    """Whether a compiler builds kernels for a GPU, if enabled; in eager mode flex_attention stores all scores.

    `torch.compiler.is_exporting` is no help: in compiled code, torch 2.11 answers True.
    """
    return ENABLED and query.is_cuda and torch.compiler.is_dynamo_compiling()


def fits_flex(query: Tensor, key: Tensor, value: Tensor, settings: Settings, op: Operator) -> bool:
    """Whether flex_attention supports the operator and the inputs."""
    inputs, mask = (query, key, value), settings.attn_mask
    return (
        depends_on_angle_alone(op)
        and settings.dropout_p == 0
        and (mask is None or not mask.requires_grad)
        and query.dtype in DTYPES
        and all(each.dim() == 4 and each.dtype == query.dtype for each in inputs)
        and key.shape[0] == value.shape[0] == query.shape[0]
        and (settings.enable_gqa or key.shape[1] == value.shape[1] == query.shape[1])
        and min(query.shape[-1], value.shape[-1]) >= LEAST_FEATURES
        and min(query.numel(), key.numel()) > 0
    )


def depends_on_angle_alone(op: Operator) -> bool:
    """Whether f = alpha g(theta) without learned constants."""
    return not op.weighted and not op.learned and all(type(part) is Sphere for part in op.magnitude.parts)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, settings: Settings, score: Score) -> Tensor:
    """softmax(scale * f(k, q) + mask) v; the inner products of normalized queries and keys are cosines."""
    query, key = (_normalized(each, score.eps) for each in (query, key))
    op, scale, mask, is_causal = score.op, settings.scale, settings.attn_mask, settings.is_causal
    assert scale is not None
    mask = None if mask is None else mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))

    def modify(cos: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = op.g(cos, score.constants) * (scale * op.h(torch.ones_like(cos), score.constants))
        if is_causal:
            return torch.where(q >= k, found, -torch.inf)
        return found if mask is None else _masked(found, mask, batch, head, q, k)

    found = flex_attention(query, key, value, modify, scale=1.0, enable_gqa=settings.enable_gqa)
    assert isinstance(found, Tensor)
    return found


def _normalized(x: Tensor, eps: float) -> Tensor:
    return (x / vector_norm(x, eps)).to(x.dtype)


def _masked(score: Tensor, mask: Tensor, *places: Tensor) -> Tensor:
    """Adds the mask at the position of a score; dimensions of size 1 broadcast."""
    own = mask[tuple(place * (size > 1) for place, size in zip(places, mask.shape, strict=True))]
    return torch.where(own, score, -torch.inf) if mask.dtype == torch.bool else score + own
