"""Linear layers of the angle alone as one product: alpha <w / ||w||, x / ||x||> of unit rows and unit filters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.eager import Options, scaled
from dcnet.kernels.convolution import MOST_COMPILED
from dcnet.kernels.known_calls import Signature
from dcnet.kernels.unit_filters import UnitFilters
from dcnet.kernels.unit_rows import MOST_FEATURES, unit_rows
from dcnet.magnitude import Sphere
from dcnet.norms import HALF_PRECISIONS, filter_norm, vector_norm
from dcnet.operator import Operator
from dcnet.parameters import Value
from dcnet.weighting import Joint, LinearlyWeighted, Product, Unweighted

# The dtypes of rows that the kernels read.
DTYPES = (*HALF_PRECISIONS, torch.float32)

_known: dict[Signature, Operator] = {}


def is_cosine(op: Operator) -> bool:
    """Whether f(w, x) = alpha cos(theta), or alpha ||w|| cos(theta)."""
    first, *others = op.magnitude.parts
    # One by one: torch.compile 2.11 cannot trace all comparisons of lists of types.
    kind = type(op.weighting)
    known = kind is Unweighted or kind is LinearlyWeighted or kind is Joint or kind is Product
    return known and not others and type(first) is Sphere and op.angle.identity


def pays(w: Tensor) -> bool:
    """Whether passes over the input cost less than passes over the output.

    A compiler fuses those over the input with its neighbors, so there an output as large as the input is enough.
    """
    filters, features = w.shape
    return filters >= features if torch.compiler.is_compiling() else filters > features


def recall_product(key: Signature | None) -> Operator | None:
    """The operator of an earlier call with this signature, which `multiply_units` supports."""
    return _known.get(key) if key is not None else None


def remember_product(key: Signature | None, op: Operator) -> None:
    """Stores the result of the checks of a first call; the key contains the identity of the operator."""
    if key is None:
        return
    while len(_known) >= MOST_COMPILED:
        _known.pop(next(iter(_known)))
    _known[key] = op


def multiply_units(
    op: Operator, input: Tensor, w: Tensor, bias: Tensor | None, options: Options, plain: bool
) -> Tensor:
    """alpha <w / ||w||, x / ||x||> + bias of every row, without a pass over the output.

    Only the weighting `linear` keeps ||w||: the others do not change alpha. `plain` says that the kernels can run, in
    plain eager mode; otherwise torch's own operations compute unit rows and filters, which a compiler fuses.
    """
    eps = options.get("eps", 1e-4)
    scale = op.alpha(op.constants({name: t.float() for name, t in (options.get("constants") or {}).items()}))
    if not plain or input.shape[-1] > MOST_FEATURES:
        rows = (input * (1 / vector_norm(input, eps))).to(input.dtype)
        filters = _times(w, scale) if op.weighting.multiplies else scaled(w, scale / filter_norm(w, eps))
        return F.linear(rows, filters, bias)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
    given = input if input.dtype in DTYPES else input.to(dtype)
    (rows,) = unit_rows((given,), eps, dtype, in_order=True)
    return F.linear(rows, _filters(op, w, scale, eps, dtype), bias)


def _filters(op: Operator, w: Tensor, scale: Value, eps: float, dtype: torch.dtype) -> Tensor:
    """alpha w, over ||w|| unless the weighting keeps it, in the dtype of the product."""
    if op.weighting.multiplies:
        return _times(w, scale).to(dtype)
    images = w.view(*w.shape, 1, 1)
    if isinstance(scale, Tensor):
        return _times(UnitFilters.apply(images, 1.0, eps, torch.float32, False).view(w.shape), scale).to(dtype)
    unit: Tensor = UnitFilters.apply(images, scale, eps, dtype, False).view(w.shape)
    return unit


def _times(w: Tensor, scale: Value) -> Tensor:
    """The filters times one number, or one for each."""
    if isinstance(scale, Tensor):
        return scaled(w, scale)
    return w if scale == 1 else w * scale
