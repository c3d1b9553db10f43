"""Converts the scores of attention modules of torch, timm and others to those of an operator, and back.

A converted module stays the same object with the same parameters. Its class becomes a subclass of the original class,
and it gets the child `scores`, a `DecoupledAttention` with the operator and its learned constants.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from dcnet.attention import DecoupledAttention, default_scale
from dcnet.convert.multihead import attend_multihead
from dcnet.operator import Operator, is_plain
from dcnet.tracing import Opaque, is_symbolic, mark_, record_call, unmark_

# Names of learned factors of the scores, in modules that normalize queries and keys themselves.
OWN_FACTORS = ("temperature", "logit_scale")

# Methods of tensors that are written in Python, such as unflatten. A compiler can trace a call of the method, but not
# one of the function.
PYTHON_METHODS = frozenset(name for name, each in vars(Tensor).items() if isinstance(each, types.FunctionType))


class Scored(nn.Module):
    """The base of all converted modules. `plain` is the class before the conversion."""

    plain: ClassVar[type[nn.Module]]
    scores: DecoupledAttention

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles by the plain class, since the converted class cannot be imported."""
        found: Any = super().__reduce_ex__(protocol)
        return _empty, (self.plain,), *found[2:]


class FusedScores(Scored):
    """A module that calls `torch.nn.functional.scaled_dot_product_attention`: the scores replace this call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(self.scores) as replaced:
            output = super().forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and not replaced.calls:
            raise RuntimeError(
                f"{self.plain.__name__} did not call scaled_dot_product_attention, so the operator has no "
                "effect: leave it out with exclude"
            )
        return output


class _Replaced(TorchFunctionMode):
    """Inside a `with`, replaces calls of `scaled_dot_product_attention` by calls of `scores`."""

    def __init__(self, scores: DecoupledAttention):
        super().__init__()
        self.scores, self.calls = scores, 0

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return _call_other(func, args, kwargs or {})
        if not torch.compiler.is_compiling():  # which would warn of a side effect
            self.calls += 1
        return _call_scores(self.scores, *args, **(kwargs or {}))


def _call_other(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if torch.compiler.is_compiling() and name in PYTHON_METHODS and args:
        return getattr(args[0], name)(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _call_scores(
    scores: DecoupledAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Calls the scores with the arguments of torch's function; a scale acts relative to torch's default."""
    if scale is not None:
        scale = scale * query.shape[-1] ** 0.5 * default_scale(scores.operator, query.shape[-1])
    return scores(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, scale)


class MultiheadScores(Scored, Opaque, nn.MultiheadAttention):
    """nn.MultiheadAttention with scores of an operator; it never takes torch's fast path."""

    def forward(  # type: ignore[override]  # layers have one input
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if any(map(is_symbolic, (query, key, value))):
            return record_call(self, query, key, value, *options)
        return attend_multihead(self, self.scores, query, key, value, *options)

    own_forward = forward  # type: ignore[assignment]


# The classes of converted modules, by plain class.
_twins: dict[Any, type[Scored]] = {}


def _twin(plain: type[nn.Module]) -> type[Scored]:
    if plain not in _twins:
        base = MultiheadScores if issubclass(plain, nn.MultiheadAttention) else FusedScores
        _twins[plain] = type(f"Converted{plain.__name__}", (base, plain), {"plain": plain, "__module__": __name__})
    return _twins[plain]


def _empty(plain: type[nn.Module]) -> Scored:
    """A module without state, for pickle and copy."""
    kind = _twin(plain)
    return kind.__new__(kind)


def convert_scores_(module: nn.Module, operator: Operator | str | None, eps: float) -> None:
    """Gives an attention module the scores of an operator in place, or torch's own for "conv" and None."""
    if isinstance(module, Scored):
        del module.scores
        unmark_(module)
        _change_class_(module, module.plain)
    if isinstance(operator, Operator):
        scores = make_scores(module, operator, eps)
        _change_class_(module, _twin(type(module)))
        module.scores = scores
        if isinstance(module, nn.MultiheadAttention):
            # Otherwise nn.TransformerEncoderLayer would use the weights without a call in evaluation.
            mark_(module)


def _change_class_(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def make_scores(module: nn.Module, operator: Operator, eps: float) -> DecoupledAttention:
    """The scores of a module, on its device."""
    like = next(module.parameters(), torch.empty(0))
    per_head = any(slot.per_channel for slot in operator.learned.values())
    # Without a constant per head, the heads may be in any dimension.
    heads = head_count(module) if per_head else None
    scores = DecoupledAttention(heads, operator=operator, eps=eps, device=like.device, dtype=like.dtype)
    return scores.train(module.training)


def head_count(module: nn.Module) -> int | None:
    """The number of heads of an attention module, if it has an attribute for it."""
    found = getattr(module, "num_heads", None)
    return found if isinstance(found, int) else None


def lacks_heads(module: nn.Module, operator: Operator | str) -> str:
    """Why the operator cannot have its constants in a module, or ""."""
    per_head = isinstance(operator, Operator) and any(slot.per_channel for slot in operator.learned.values())
    return "it has no num_heads, which constants per head need" if per_head and head_count(module) is None else ""


def is_attention(module: nn.Module, also: Sequence[type[nn.Module]] = ()) -> bool:
    """Whether a module is attention of queries and keys: by its class, or by the attributes of timm's attention."""
    if isinstance(module, Scored | nn.MultiheadAttention):
        return True
    if isinstance(module, _ConvNd | nn.Linear | DecoupledAttention):
        return False
    return type(module) in also or hasattr(module, "fused_attn") or _is_named_attention(module)


def _is_named_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return head_count(module) is not None and ("attention" in name or "attn" in name)


def attention_obstacle(module: nn.Module, also: Sequence[type[nn.Module]] = ()) -> str:
    """Why the scores of an attention module cannot be converted, or ""."""
    kind = module.plain if isinstance(module, Scored) else type(module)
    if "forward" in vars(module):
        return "its forward was replaced"
    if isinstance(module, Scored) or kind in (nn.MultiheadAttention, *also):
        return ""
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind.__name__} may compute something else; name it in `also` if it does not"
    if hasattr(module, "scores"):
        return "it has an attribute named scores already"
    if any(hasattr(module, name) for name in OWN_FACTORS):
        return "it normalizes queries and keys itself"
    if getattr(module, "fused_attn", None) is False:
        return "it calls scaled_dot_product_attention only with fused_attn=True; set this attribute first"
    if not hasattr(module, "fused_attn"):
        return "it may not call scaled_dot_product_attention; name it in `also` if it does"
    return ""


def describe_attention(module: nn.Module, operator: Operator | str | None = None) -> str:
    """The plain class of an attention module, with its operator if any; or what it would be with the given one."""
    plain = module.plain if isinstance(module, Scored) else type(module)
    if operator is None:
        operator = module.scores.operator if isinstance(module, Scored) else ""
    return plain.__name__ if is_plain(operator) else f"{plain.__name__} {operator}".strip()
