"""Layers for inference: everything that does not depend on the input is precomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcnet import kernels
from dcnet.clamp import is_traced
from dcnet.convert.selection import plain_class
from dcnet.cpu_passes import in_parts
from dcnet.eager import ConvPatches, LinearPatches, Patches, check_input, relative_to_mean, scaled
from dcnet.kernels.plan import has_device_functions
from dcnet.layers import Decoupled, DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from dcnet.norms import accumulation_dtype, filter_norm, within_range
from dcnet.operator import Operator
from dcnet.parameters import Value
from dcnet.tracing import Opaque, mark_

Layer = DecoupledConv1d | DecoupledConv2d | DecoupledConv3d | DecoupledLinear

PlainLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear

# Attributes that a forward may read from a layer.
GEOMETRY = (
    *("in_features", "out_features", "in_channels", "out_channels"),
    *("kernel_size", "stride", "padding", "dilation", "groups"),
)


class Folded(Opaque):
    """A decoupled layer in evaluation mode, including a batch normalization after it.

    `weight` holds the filters times every factor that can be folded into them, `factor` the remaining factors, `bias`
    the bias and the shift of the normalization. The constants of the operator are buffers; a relative radius is
    multiplied by the mean norm. There are no parameters and no running statistics.
    """

    weight: Tensor
    bias: Tensor | None
    factor: Tensor
    w_norm: Tensor

    @torch.no_grad()
    def __init__(self, layer: Layer, norm: _BatchNorm | None = None):
        super().__init__()
        op, w_norm, (own, constants) = layer.operator, filter_norm(layer.weight, layer.eps), _constants(layer)
        factor = torch.ones_like(w_norm) * op.factor(w_norm, own)
        if op.norm_cancels:
            factor = factor * op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), constants)
        bias = layer.bias
        if norm is not None:
            scale, shift = scale_and_shift(norm)
            factor, bias = factor * scale, shift if bias is None else bias * scale + shift
        absorbed = op.angle.homogeneous and (op.angle.identity or bool((factor >= 0).all()))
        self.operator, self.eps = op, layer.eps
        # A custom function may combine patches, or return a tensor that it keeps.
        self.is_elementwise = has_device_functions(op)
        # Whether a factor of the filters is left, or their norms scale those of the patches.
        argument = op.weighting.argument(w_norm, torch.ones_like(w_norm))
        self.is_weighted = not absorbed or bool((argument != 1).any())
        vars(self).update({name: getattr(layer, name) for name in GEOMETRY if hasattr(layer, name)})
        self.coefficients = coefficients(op, own)
        self.fixed = {name: value for name, value in constants.items() if not isinstance(value, Tensor)}
        self.register_buffer("weight", scaled(layer.weight, factor / w_norm if absorbed else 1 / w_norm))
        # Detached, since torch.export would look for a parameter in the list of parameters.
        self.register_buffer("bias", bias if bias is None else bias.detach().to(layer.weight.dtype))
        self.register_buffer("factor", torch.ones_like(factor[:1]) if absorbed else factor)
        self.register_buffer("w_norm", w_norm)
        for name, value in constants.items():
            if isinstance(value, Tensor):
                self.register_buffer(f"constant_{name}", value.detach())

    def combine(self, at: Patches) -> Tensor:
        """Applies the operator with prepared filters; values of the norm alone keep one channel where possible."""
        product, constants, factor = at.multiply(self.weight), self._spread_constants(at), at.per_filter(self.factor)
        if self.operator.norm_cancels:
            output = self._finish(at, self.operator.g(product, constants), factor, product.dtype)
        elif self._takes_one_pass(constants) or not self.is_elementwise:
            output = self._combine(at, constants, factor, product, at.norm(self.eps))
        else:
            combine = functools.partial(self._combine, at, constants, factor)
            output = in_parts(combine, product, at.norm(self.eps), product.dim() - len(at.shape))
        return at.arrange(output)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}, operator={str(self.operator)!r}"

    def _takes_one_pass(self, constants: Mapping[str, Value]) -> bool:
        """Whether the output is the inner product times a function of the patch norm alone."""
        per_filter = any(
            isinstance(value, Tensor) and value.numel() > 1 for value in (*constants.values(), self.factor)
        )
        return self.operator.angle.identity and not self.operator.weighting.weighted and not per_filter

    def _combine(
        self, at: Patches, constants: Mapping[str, Value], factor: Tensor, product: Tensor, n: Tensor
    ) -> Tensor:
        op, dtype = self.operator, product.dtype
        product, inverse = within_range(product, n)
        if op.angle.homogeneous:
            g, factor = op.g(product, constants), factor * inverse
        else:
            g = op.g(_multiply(product, inverse), constants)
        return self._finish(at, g, self._h(at, n, factor, constants), dtype)

    def _h(self, at: Patches, n: Tensor, factor: Tensor, constants: Mapping[str, Value]) -> Tensor:
        argument = self.operator.weighting.argument(at.per_filter(self.w_norm), n)
        if not self.coefficients:
            return self.operator.h(argument, constants) * factor
        # Multiply the factor into alpha first, which saves a pass over all channels.
        return self.operator.h(
            argument, {**constants, **{name: constants[name] * factor for name in self.coefficients}}
        )

    def _finish(self, at: Patches, g: Tensor, h: Tensor, dtype: torch.dtype) -> Tensor:
        """g * h + bias, in place where allowed."""
        if not (self.is_elementwise and _may_overwrite() and g.dtype == h.dtype == dtype):
            return at.finish(g, h, self.bias, dtype)
        output = _multiply(g, h)
        return output if self.bias is None else output.add_(at.per_filter(self.bias))

    def _spread_constants(self, at: Patches) -> dict[str, Value]:
        constants: dict[str, Value] = dict(self.fixed)
        for name, slot in self.operator.slots.items():
            if name not in constants:
                value = self.get_buffer(f"constant_{name}")
                constants[name] = at.per_filter(value) if slot.size == 1 else value
        return constants


class FoldedLinear(Folded):
    """A DecoupledLinear for inference."""

    def __init__(self, layer: DecoupledLinear, norm: _BatchNorm | None = None):
        super().__init__(layer, norm)
        mark_(self)

    def compute(self, input: Tensor) -> Tensor:
        return self.combine(LinearPatches(input, self.weight))


class FoldedConv(Folded):
    """A DecoupledConv1d, 2d or 3d for inference."""

    is_folded = True

    def __init__(self, layer: DecoupledConv1d | DecoupledConv2d | DecoupledConv3d, norm: _BatchNorm | None = None):
        super().__init__(layer, norm)
        self.padding_mode, self.ends = layer.padding_mode, layer._reversed_padding_repeated_twice
        padding = layer.padding if layer.padding_mode == "zeros" else (0,)
        self.window = (layer.stride, padding, layer.dilation, layer.groups)
        self._kept: dict[str, tuple[Any, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, whose tensors are others."""
        return {**vars(self), "_kept": {}}

    def table(self) -> Tensor:
        """Constants and factors as the kernels read them; rebuilt if one was changed, replaced or moved."""
        # Without the filters: these are large, and would stay in memory after they are replaced.
        used = [tensor for name, tensor in self._buffers.items() if name not in ("weight", "bias")]
        given = [tensor for tensor in used if tensor is not None]
        table: Tensor = self._keep("table", self._make_table, given)
        return table

    def rows(self, prelu: Tensor | None) -> Tensor | None:
        """Bias and slopes of PReLU as the kernels read them; rebuilt if one was changed, replaced or moved."""
        given = [tensor for tensor in (self.bias, prelu) if tensor is not None]
        rows: Tensor | None = self._keep("rows", lambda: self._make_rows(prelu), given)
        return rows

    def _make_rows(self, prelu: Tensor | None) -> Tensor | None:
        return kernels.folded_rows(self.bias, prelu, len(self.weight))

    def _keep(self, name: str, make: Callable[[], Any], sources: Sequence[Tensor]) -> Any:
        """The result of `make`, which is called again if one of the tensors was changed, replaced or moved."""
        # A compiler cannot read addresses, tensors of inference mode have no version counter, and a graph may be large.
        if not kernels.is_plain_eager(self.weight) or any(one.is_inference() or one.grad_fn for one in sources):
            return make()
        state = [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in sources]
        kept = self._kept.get(name)
        if kept is None or kept[0] != state:
            # New tensors cannot have the identity or the address of old ones while these, and their memory, are held.
            held = [(tensor, tensor.detach()) for tensor in sources]
            self._kept[name] = kept = (state, make(), held)
        return kept[1]

    def _make_table(self) -> Tensor:
        names = [name for name in self.operator.slots if name not in self.fixed]
        buffers: dict[str, Value] = {name: self.get_buffer(f"constant_{name}") for name in names}
        return kernels.folded_table(self.operator, {**self.fixed, **buffers}, self.factor, self.w_norm)

    def compute(self, input: Tensor) -> Tensor:
        spatial = self.weight.dim() - 2
        padded = input
        if self.padding_mode != "zeros":
            check_input(input, self.weight.shape[1] * self.window[-1], -spatial - 1, "channels")
            padded = F.pad(input, self.ends, mode=self.padding_mode)
        if kernels.fits_folded(padded, self.weight, self.bias, self.operator, self.window[1], self.window[-1]):
            return kernels.folded(padded, self.weight, self.bias, self.table(), self.operator, self.eps, self.window)
        return self.combine(ConvPatches(spatial, padded, self.weight, *self.window))


def fold_layer(layer: Layer, norm: _BatchNorm | None = None) -> nn.Module:
    """The layer for inference, with the batch normalization after it; torch's own layer if that computes the same."""
    folded = FoldedLinear(layer, norm) if isinstance(layer, DecoupledLinear) else FoldedConv(layer, norm)
    if not (layer.operator.norm_cancels and layer.operator.angle.identity):
        return folded
    plain = _plain(layer, folded.bias is not None)
    plain.weight = nn.Parameter(folded.weight, requires_grad=False)
    if folded.bias is not None:
        plain.bias = nn.Parameter(folded.bias, requires_grad=False)
    return plain


def _may_overwrite() -> bool:
    """Whether in-place operations are allowed: no gradient is needed, and torch.jit is not tracing."""
    return not torch.is_grad_enabled() and not is_traced()


def _multiply(values: Tensor, factor: Tensor) -> Tensor:
    """The product, in place where allowed: allocating memory is the most expensive part of a pass."""
    in_place = _may_overwrite() and values.dtype == factor.dtype
    return values.mul_(factor) if in_place else values * factor


def scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Batch normalization in evaluation mode as y = scale * x + shift, per channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    dtype = accumulation_dtype(norm.running_var.dtype)
    scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def coefficients(op: Operator, constants: Mapping[str, Value]) -> tuple[str, ...]:
    """The constants except the radius if h is homogeneous in all of them together, otherwise none."""
    names = tuple(name for name in op.slots if name not in op.angle.slots() and not name.startswith("radius"))
    base = {name: value.double().cpu() if isinstance(value, Tensor) else value for name, value in constants.items()}
    n = torch.logspace(-3, 3, 61, dtype=torch.float64, device="cpu").unsqueeze(1)
    for factor in (3.0, 0.1, -1.0):
        multiplied = {**base, **{name: base[name] * factor for name in names}}
        if not torch.allclose(op.h(n, multiplied), factor * op.h(n, base), rtol=1e-9, atol=0):
            return ()
    return names


def _constants(layer: Decoupled) -> tuple[dict[str, Value], dict[str, Value]]:
    """The constants in float32 or better: as stored, and with a relative radius multiplied by the mean norm."""
    op, weight = layer.operator, layer.weight
    stored = {name: value.to(accumulation_dtype(weight.dtype)) for name, value in layer.learned().items()}
    own = op.constants(stored)
    like = torch.empty(0, dtype=accumulation_dtype(weight.dtype))
    mean = layer._buffers.get("mean_norm")
    return own, relative_to_mean(op, own, like, {"operator": op, "mean_norm": mean})


def _plain(layer: Layer, bias: bool) -> PlainLayer:
    """torch's own layer of the same shape, on the meta device."""
    if isinstance(layer, DecoupledLinear):
        return nn.Linear(layer.in_features, layer.out_features, bias, device="meta")
    window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    kind: Any = plain_class(layer)
    return kind(layer.in_channels, layer.out_channels, *window, bias, layer.padding_mode, device="meta")
