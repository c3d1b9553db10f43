"""The arguments of attention, and their checks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.checks import check_flag, check_number, check_tensor
from dcnet.clamp import is_traced


class Settings(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention` after query, key and value."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def check_inputs(query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> None:
    if is_traced():
        # The sizes are tensors, and torch.jit warns about comparisons.
        return
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    dtypes = [str(tensor.dtype) for tensor in named.values()]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(f"query, key and value must have one dtype, not {', '.join(dtypes)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key of shape {list(key.shape)} must have {query.shape[-1]} features, as the query does")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value of shape {list(value.shape)} must have {key.shape[-2]} rows, as the key does")
    _check_numbers(settings)
    leading = _check_heads(query, key, value, settings.enable_gqa)
    _check_mask(settings, (*leading, query.shape[-2], key.shape[-2]))


def _check_numbers(settings: Settings) -> None:
    check_flag("is_causal", settings.is_causal)
    check_flag("enable_gqa", settings.enable_gqa)
    # A graph that is compiled for any number has no values to check.
    if not torch.compiler.is_compiling():
        check_number("dropout_p", settings.dropout_p, least=0, most=1)
        check_number("scale", 1 if settings.scale is None else settings.scale)


def _check_tensor(name: str, tensor: Any) -> None:
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, not {tensor.dtype}: convert it with .float()")
    if tensor.is_nested:
        raise TypeError(f"{name} must not be a nested tensor: pad it, and mask the padding with attn_mask")
    if tensor.dim() < 2:
        raise ValueError(f"{name} must be [..., heads, length, features], not {list(tensor.shape)}")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[int, ...]:
    """Checks all dimensions before the last two. Returns those of the scores."""
    shapes = [list(tensor.shape[:-2]) for tensor in (query, key, value)]
    if grouped:
        if not all(shapes):
            raise ValueError(f"enable_gqa needs [..., heads, length, features], not a query of {list(query.shape)}")
        heads, own = shapes[0][-1], shapes[1][-1]
        if own != shapes[2][-1] or own == 0 or heads % own:
            found = f"{own} and {shapes[2][-1]}"
            raise ValueError(
                f"the heads of key and value, {found}, must be equal and divide those of the query, {heads}"
            )
        shapes = [[*shape[:-1], heads] for shape in shapes]
    if broadcast(*shapes) is None:
        found = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key and value of shapes {found} must have leading dimensions that broadcast")
    return broadcast(*shapes[:2]) or ()


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that all of them broadcast to, or None."""
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, size in enumerate(shape, len(found) - len(shape)):
            if size != 1 and found[place] != 1 and found[place] != size:
                return None
            found[place] = found[place] if size == 1 else size
    return tuple(found)


def _check_mask(settings: Settings, scores: tuple[int, ...]) -> None:
    mask = settings.attn_mask
    if mask is None:
        return
    check_tensor("attn_mask", mask)
    if settings.is_causal:
        raise ValueError(f"is_causal must be False with an attn_mask, here of shape {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool, True where a query attends, or floating-point, not {mask.dtype}")
    if broadcast(mask.shape, scores) != scores:
        raise ValueError(f"attn_mask of shape {list(mask.shape)} must broadcast to the scores, {list(scores)}")
