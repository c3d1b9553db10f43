"""The attention of nn.MultiheadAttention with scores of an operator: projections, masks, and weights on demand."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.attention import DecoupledAttention


class Inputs(NamedTuple):
    """Query, key and value with the batch first, and whether they are one tensor."""

    query: Tensor
    key: Tensor
    value: Tensor
    same: bool


def attend_multihead(
    module: nn.MultiheadAttention,
    scores: DecoupledAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output and, if needed, the weights of `nn.MultiheadAttention`, with softmax over the scores."""
    if query.is_nested:
        _check_nested(query, key, value, key_padding_mask, attn_mask)
        return _attend_nested(module, scores, query), None
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True of nn.MultiheadAttention needs an attn_mask, not None")
    inputs = _batch_first(module, query, key, value)
    # As in torch, the mask is not read if the hint is enough.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_causal else _merged_mask(module, inputs, attn_mask, key_padding_mask)
    output, weights = _attend(module, scores, inputs, mask, is_causal, need_weights)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if query.dim() == 2:
        return output[0], None if weights is None else weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights


def _attend(
    module: nn.MultiheadAttention,
    scores: DecoupledAttention,
    inputs: Inputs,
    mask: Tensor | None,
    is_causal: bool = False,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output and weights, batch first. The weights are per head and, as in torch, after dropout."""
    query, key, value = _projected(module, inputs)
    dropout_p, weights = module.dropout if module.training else 0.0, None
    if need_weights:
        weights = F.dropout(scores.weights(query, key, mask), dropout_p).to(value.dtype)
        output = weights @ value
    else:
        output = scores(query, key, value, mask, dropout_p, is_causal)
    # As in torch, the layer is not called.
    return F.linear(output.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias), weights


def _batch_first(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    dims = [each.dim() for each in (query, key, value)]
    if dims not in ([2, 2, 2], [3, 3, 3]):
        raise ValueError(f"query, key and value must all have 2 or 3 dimensions, not {dims}")
    for name, each, size in (
        ("query", query, module.embed_dim),
        ("key", key, module.kdim),
        ("value", value, module.vdim),
    ):
        if each.shape[-1] != size:
            raise ValueError(f"{name} of shape {list(each.shape)} must have {size} features")
    same = query is key and key is value
    if dims[0] == 2:
        query, key, value = query[None], key[None], value[None]
    elif not module.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        sizes = ", ".join(f"{each.shape[0]} x {each.shape[1]}" for each in (query, key, value))
        raise ValueError(f"query, key and value must be batches of one size, key and value of one length, not {sizes}")
    return Inputs(query, key, value, same)


def _projected(module: nn.MultiheadAttention, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Projected queries, keys and values, [N, heads, length, head size], with the extra key and value if any."""
    packed, bias = module.in_proj_weight, module.in_proj_bias
    if packed is not None and inputs.same:
        query, key, value = F.linear(inputs.query, packed, bias).chunk(3, -1)
    else:
        weights = packed.chunk(3) if packed is not None else _separate_weights(module)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        query, key, value = map(F.linear, inputs[:3], weights, biases)
    if module.bias_k is not None and module.bias_v is not None:
        key, value = _appended(key, module.bias_k), _appended(value, module.bias_v)
    if module.add_zero_attn:
        zero = key.new_zeros(1, 1, 1)
        key, value = _appended(key, zero), _appended(value, zero)
    split = [each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for each in (query, key, value)]
    return split[0], split[1], split[2]


def _separate_weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    found = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return tuple(weight for weight in found if weight is not None)


def _appended(rows: Tensor, row: Tensor) -> Tensor:
    return torch.cat([rows, row.expand(rows.shape[0], 1, rows.shape[2])], 1)


def _merged_mask(
    module: nn.MultiheadAttention, inputs: Inputs, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Both masks as numbers to add to the scores, with zeros for the extra keys."""
    (samples, queries), keys = inputs.query.shape[:2], inputs.key.shape[1]
    found = []
    if attn_mask is not None:
        shapes = [(queries, keys), (samples * module.num_heads, queries, keys)]
        numbers = _as_numbers("attn_mask", attn_mask, shapes, inputs.query.dtype)
        found.append(numbers if numbers.dim() == 2 else numbers.view(samples, -1, queries, keys))
    if key_padding_mask is not None:
        shapes = [(samples, keys)] if samples != 1 else [(samples, keys), (keys,)]
        numbers = _as_numbers("key_padding_mask", key_padding_mask, shapes, inputs.query.dtype)
        found.append(numbers.view(samples, 1, 1, keys))
    if not found:
        return None
    extra = (module.bias_k is not None) + module.add_zero_attn
    return F.pad(found[0] if len(found) == 1 else found[0] + found[1], (0, extra))


def _as_numbers(name: str, mask: Tensor, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to the scores; a bool mask is True where a query must not attend."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool, True where a query must not attend, or floating-point, not {mask.dtype}")
    if not any(tuple(mask.shape) == shape for shape in shapes):
        right = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} of shape {list(mask.shape)} must be {right}")
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _check_nested(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None) -> None:
    if query is not key or key is not value or any(mask is not None for mask in masks):
        raise ValueError("nested tensors support only self-attention without masks: pad them, and mask the padding")


def _attend_nested(module: nn.MultiheadAttention, scores: DecoupledAttention, input: Tensor) -> Tensor:
    """Self-attention of sequences of different lengths, as in evaluation of `nn.TransformerEncoder`."""
    lengths = [len(part) for part in input.unbind()]
    padded = input.to_padded_tensor(0.0)
    places = torch.arange(padded.shape[1], device=padded.device)
    padding = places >= torch.tensor(lengths, device=padded.device)[:, None]
    inputs = Inputs(padded, padded, padded, True)
    output, _ = _attend(module, scores, inputs, _merged_mask(module, inputs, None, padding))
    parts = [row[:length] for row, length in zip(output, lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=input.layout)
