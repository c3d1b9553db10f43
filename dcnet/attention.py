"""Attention whose scores are f(k, q) = h(||k||, ||q||) * g(theta) instead of inner products <q, k>.

Keys are the filters and queries the patches: the weighting says how ||k|| enters, and the magnitude acts on ||q||."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet import kernels
from dcnet.attention_inputs import Settings, check_inputs
from dcnet.checks import check_number, check_whole
from dcnet.clamp import is_traced
from dcnet.eager import check_options
from dcnet.flex_scores import attend_flex, compiles_for_gpu, fits_flex
from dcnet.magnitude import Sphere
from dcnet.norms import accumulation_dtype, vector_norm
from dcnet.operator import Operator, as_operator
from dcnet.parameters import Value
from dcnet.tracing import Opaque, is_symbolic, record_call
from dcnet.weighting import Weighting

# Cosine attention with one learned scale per head.
COSINE = "sphere(scale=Learnable(per_channel=True))-cos"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: Settings,
    operator: Operator | str,
    eps: float = 1e-4,
    stored: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """softmax(scale * f(k, q) + mask) v; see `dcnet.functional.decoupled_attention`."""
    check_inputs(query, key, value, settings)
    score = _score(query, operator, eps, stored)
    if settings.scale is None:
        settings = settings._replace(scale=default_scale(score.op, query.shape[-1]))
    if separates(score.op):
        return _by_inner_products(query, key, value, settings, score)
    compute = (
        attend_flex if compiles_for_gpu(query) and fits_flex(query, key, value, settings, score.op) else _by_cosines
    )
    return compute(query, key, value, settings, score)


def attention_weights(
    query: Tensor,
    key: Tensor,
    settings: Settings,
    operator: Operator | str,
    eps: float = 1e-4,
    stored: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """softmax(scale * f(k, q) + mask), [..., L, S], in float32 or better; without dropout."""
    check_inputs(query, key, key, settings)
    score = _score(query, operator, eps, stored)
    scale = default_scale(score.op, query.shape[-1]) if settings.scale is None else settings.scale
    return _softmax(score.matrix(query, key, scale), settings)


def _score(query: Tensor, operator: Operator | str, eps: float, stored: Mapping[str, Tensor] | None) -> "Score":
    op = check_options({"operator": operator, "eps": eps, "constants": stored})
    check_operator(op)
    return Score(op, eps, _constants(op, stored or {}, query))


def default_scale(op: Operator, features: int) -> float:
    """sqrt(E)^(1 - n), where n counts the norms (of query, of key) in which the score is unbounded.

    Entries of variance 1 have norms near sqrt(E) and cosines near 1 / sqrt(E): this scale makes scores of about 1.
    """
    bounded = bool(op.magnitude.bounded)
    key_grows = op.weighted and not (bounded and op.weighting.keeps_bound)
    return float(max(features, 1)) ** ((1 - (not bounded) - key_grows) / 2)


def separates(op: Operator) -> bool:
    """Whether f(k, q) is an inner product of a scaled query and a scaled key, which torch's fused attention takes."""
    return op.angle.identity and (_factors(op) or op.norm_cancels)


def _factors(op: Operator) -> bool:
    """Whether the weighting multiplies h(||q||) by a function of ||k||, unlike h(||k|| ||q||)."""
    return type(op.weighting).argument is Weighting.argument


def check_operator(op: Operator) -> None:
    """Rejects radii relative to a mean norm: attention has no running mean."""
    if op.decay is not None:
        raise ValueError(
            f"{str(op)!r} has a radius relative to the mean norm, which attention does not compute: use a number or "
            "Radius(relative=False)"
        )


class Score(NamedTuple):
    """f(k, q) of an operator with its constants, those per head as [heads, 1, 1]."""

    op: Operator
    eps: float
    constants: Mapping[str, Value]

    def scaled(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """q h(||q||) / ||q||, k times the factor of the weighting over ||k||, and a number to multiply both by."""
        first, *others = self.op.magnitude.parts
        # Not a comparison of lists of types, which torch.compile 2.11 cannot trace.
        constant, number = not others and type(first) is Sphere, 1.0
        if constant and not self.op.weighted:
            (query, key), number = _normalized((query, key), self.eps)
        elif constant:
            ((query,), number), key = _normalized((query,), self.eps), _times(key, self.on_key(key))
        elif self.op.weighted:
            query, key = _times(query, self.on_query(query)), _times(key, self.on_key(key))
        else:
            query, ((key,), number) = _times(query, self.on_query(query)), _normalized((key,), self.eps)
        scale = self.constants["scale"] if constant else 1.0
        return (_times(query, scale), key, number) if isinstance(scale, Tensor) else (query, key, number * scale)

    def on_query(self, query: Tensor) -> Value:
        """h(||q||) / ||q||, without the norm if h is proportional to it."""
        if self.op.norm_cancels:
            one = torch.ones(1, device=query.device, dtype=accumulation_dtype(query.dtype))
            return self.op.h(one, self.constants)
        n = vector_norm(query, self.eps)
        return self.op.h(n, self.constants) / n

    def on_key(self, key: Tensor) -> Value:
        """The factor of the weighting over ||k||; 1 if the factor is ||k||, or if h(||k|| ||q||) is proportional."""
        if self.op.weighting.multiplies or not _factors(self.op):
            return 1.0
        n = vector_norm(key, self.eps)
        return self.op.factor(n, self.constants) / n

    def matrix(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """scale * f(k, q) of every query and key, in float32 or better: [..., L, S]."""
        q_norm, k_norm = vector_norm(query, self.eps), vector_norm(key, self.eps)
        # Normalized before the product, which cannot overflow then.
        cos = _times(query, 1 / q_norm) @ _times(key, 1 / k_norm).mT
        g = self.op.g(cos.to(accumulation_dtype(cos.dtype)), self.constants)
        h = self.op.h(self.op.weighting.argument(k_norm.mT, q_norm), self.constants)
        scores, factor = g * (scale * h), self.op.factor(k_norm.mT, self.constants)
        return scores * factor if isinstance(factor, Tensor) else scores


def _by_inner_products(query: Tensor, key: Tensor, value: Tensor, settings: Settings, score: Score) -> Tensor:
    """Torch's own attention of q h(||q||) / ||q|| and of k times its factor over ||k||."""
    mask, dropout_p, is_causal, scale, grouped = settings
    per_head = any(isinstance(each, Tensor) and each.dim() > 1 for each in score.constants.values())
    if grouped and per_head and score.op.weighting.uses_magnitude:
        # The factor of a key depends on the head of the query.
        key, value, grouped = *_repeat_heads(query, key, value), False
    if mask is not None:
        # Torch needs a mask of two dimensions or more, and a mask of numbers in the dtype of the query.
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        mask = mask if mask.dim() > 1 else mask.view(1, -1)
    assert scale is not None
    query, key, number = score.scaled(query, key)
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale * number, enable_gqa=grouped
    )


def _by_cosines(query: Tensor, key: Tensor, value: Tensor, settings: Settings, score: Score) -> Tensor:
    """The formula step by step: scores, mask, softmax, dropout, times the values."""
    if settings.enable_gqa:
        key, value = _repeat_heads(query, key, value)
    assert settings.scale is not None
    weights = _softmax(score.matrix(query, key, settings.scale), settings)
    return F.dropout(weights, settings.dropout_p).to(value.dtype) @ value


def _normalized(tensors: Sequence[Tensor], eps: float) -> tuple[Sequence[Tensor], float]:
    """x / ||x|| of each tensor, as tensors times a number for their product.

    On a GPU one launch normalizes all of them. Elsewhere, x / rms(x) takes one launch each and has the norm sqrt(size).
    Compilers fuse the formula by themselves, and may not know the size. With eps = 0, rms_norm divides by zero.
    """
    size = tensors[0].shape[-1]
    if not (torch.compiler.is_compiling() or is_traced() or size == 0):
        units = kernels.unit_vectors(tensors, eps)
        if units is not None:
            return units, 1.0
        if eps > 0:
            return [F.rms_norm(x, (size,), eps=eps / size) for x in tensors], size ** (-len(tensors) / 2)
    return [_times(x, 1 / vector_norm(x, eps)) for x in tensors], 1.0


def _times(x: Tensor, factor: Value) -> Tensor:
    return (x * factor).to(x.dtype) if isinstance(factor, Tensor) else x


def _softmax(scores: Tensor, settings: Settings) -> Tensor:
    """The softmax of the masked scores; zero for queries that may attend to no key, as in torch."""
    mask = settings.attn_mask
    if settings.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.softmax(-1)
    masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # Filled before the softmax too: the gradient of a softmax of -inf alone is NaN.
    empty = (masked == -torch.inf).all(-1, keepdim=True)
    return masked.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with as many heads as the query."""
    times = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)


def _constants(op: Operator, stored: Mapping[str, Tensor], query: Tensor) -> dict[str, Value]:
    """Every constant in float32 or better, those per head as [heads, 1, 1]."""
    dtype, heads = accumulation_dtype(query.dtype), query.shape[-3] if query.dim() > 2 else 1
    values = op.constants({name: tensor.to(dtype) for name, tensor in stored.items()})
    for name, value in values.items():
        if isinstance(value, Tensor):
            size = op.slots[name].size
            _check_count(name, value.numel(), size, heads)
            per_head = size == 1 and value.numel() != 1
            values[name] = value.view(-1, 1, 1) if per_head else value.view(-1).to(query.device, dtype)
    return values


def _check_count(name: str, count: int, size: int, heads: int) -> None:
    # By comparisons alone: for a compiler, a size that may change is in no tuple.
    if count != size and (size != 1 or count != heads):
        expected = f"one, or one for each of {heads} heads" if size == 1 else str(size)
        raise ValueError(f"the constant {name!r} has {count} numbers, but must have {expected}")


class DecoupledAttention(Opaque):
    """softmax(scale * f(k, q) + mask) v, with the operator and its learned constants; it has no projections.

    Each learned constant is a parameter of the same name: `radius`, `k`, `scale`, ..., stored as in decoupled layers,
    with one number per head where a layer has one per output channel.

    Args:
        num_heads: the heads of the query; needed for constants that are learned per head.
        operator: an Operator or its spec; by default cosine attention with one learned scale per head.
        eps: added under the square root of ||q|| and ||k||.
        scale: the fixed factor of the scores; None for that of `dcnet.functional.decoupled_attention`.
    """

    def __init__(
        self,
        num_heads: int | None = None,
        *,
        operator: Operator | str = COSINE,
        eps: float = 1e-4,
        scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.operator = as_operator(operator)
        check_operator(self.operator)
        check_number("eps", eps, least=0)
        check_number("scale", 1 if scale is None else scale)
        # Not `scale`, which is the name of a learned constant.
        self.eps, self.fixed_scale = float(eps), scale
        self.num_heads = None if num_heads is None else check_whole("num_heads", num_heads, least=1)
        like = torch.empty(0, device=device, dtype=dtype)
        for name, initial in self._initial().items():
            if hasattr(self, name):
                raise ValueError(
                    f"{str(self.operator)!r} has a constant named {name!r}, which attention uses: rename it"
                )
            self.register_parameter(name, nn.Parameter(initial.to(like)))

    def _initial(self) -> dict[str, Tensor]:
        learned = self.operator.learned
        if self.num_heads is None and any(slot.per_channel for slot in learned.values()):
            raise ValueError(f"{str(self.operator)!r} learns a constant per head: num_heads must be a number, not None")
        return {name: slot.initial(self.num_heads or 1) for name, slot in learned.items()}

    def forward(  # type: ignore[override]  # layers have one input
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        if any(map(is_symbolic, (query, key, value, attn_mask))):
            return record_call(self, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, scale)
        self._check_heads(query)
        scale = self.fixed_scale if scale is None else scale
        settings = Settings(attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attend(query, key, value, settings, self.operator, self.eps, self.learned())

    own_forward = forward  # type: ignore[assignment]

    def weights(self, query: Tensor, key: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The weights of the values, softmax(scale * f(k, q) + mask): [..., L, S], in float32 or better."""
        self._check_heads(query)
        settings = Settings(attn_mask, scale=self.fixed_scale)
        return attention_weights(query, key, settings, self.operator, self.eps, self.learned())

    def _check_heads(self, query: Tensor) -> None:
        if self.num_heads is not None and not is_traced() and (query.dim() < 3 or query.shape[-3] != self.num_heads):
            raise ValueError(
                f"query of shape {list(query.shape)} must have {self.num_heads} heads, its third-last size"
            )

    def learned(self) -> dict[str, Tensor]:
        """The learned constants as they are stored, by name."""
        return {name: getattr(self, name) for name in self.operator.learned}

    def constants(self) -> dict[str, Value]:
        """The current constants of the operator."""
        return self.operator.constants(self.learned())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets the learned constants to those of a new module."""
        for name, initial in self._initial().items():
            self.get_parameter(name).copy_(initial)

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f"{self.num_heads}, "
        fixed = "" if self.fixed_scale is None else f", scale={self.fixed_scale}"
        return f"{heads}operator={str(self.operator)!r}{fixed}"
