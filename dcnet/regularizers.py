"""What filters are held to in place of L2 decay: orthonormal, orthogonal, far apart on the sphere (Section 5)."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dcnet.layers import Decoupled
from dcnet.learnable import check_number
from dcnet.limits import at_least
from dcnet.norms import accumulation_dtype

# Far below the square of any filter's norm, so that it matters to a filter of zeros only.
NORM_EPS = 1e-12

Choose = str | Callable[[str, nn.Module], bool]
Filters = dict[str, Tensor]
Measure = Callable[[Tensor], Tensor]
# A scalar, or a dict of one for each layer; a union would have to be narrowed wherever it meets a loss.
Measured = Any


def orthonormal(
    model: nn.Module, *, normalize: bool = True, layers: Choose = "decoupled", reduce: str = "sum"
) -> Measured:
    """||W^T W - I||_F^2 of each layer, the columns of W being its filters (Section 5).

    The authors add it to the loss at 1e-5 times one half: `loss + 0.5e-5 * dcnet.regularizers.orthonormal(model)`.

    Filters of different groups of a convolution never meet, and are not compared. The result is in float32 or better,
    under autocast too.

    Args:
        model: a network.
        normalize: take w / ||w|| in place of w. The diagonal is then zero by itself, and the norms are left free.
        layers: "decoupled", or a function that says of the name and the layer whether to count it; it is asked of
            every decoupled, convolutional and linear layer.
        reduce: "sum" over the layers, or "layers" for each one's value by its name.
    """
    return orthonormal_of(filters_of(model, layers), normalize, reduce)


def orthonormal_of(filters: Filters, normalize: bool = True, reduce: str = "sum") -> Measured:
    """`orthonormal` of the filters that `filters_of` finds: arithmetic alone, for torch.compile to fuse."""

    def measure(filters: Tensor) -> Tensor:
        products = _gram(filters, normalize)
        return (products - torch.eye(products.shape[-1], device=products.device)).square().sum((1, 2))

    return _measured(filters, reduce, measure, torch.sum)


def orthogonal(
    model: nn.Module, *, normalize: bool = False, layers: Choose = "decoupled", reduce: str = "sum"
) -> Measured:
    """||W^T W - diag(W^T W)||_F^2 of each layer, the columns of W being its filters (Section 5).

    Arguments are those of `orthonormal`, with which it coincides on normalised filters.
    """

    def measure(filters: Tensor) -> Tensor:
        products = _gram(filters, normalize)
        return products.masked_fill(_diagonal(products), 0.0).square().sum((1, 2))

    return _measured(filters_of(model, layers), reduce, measure, torch.sum)


def hyperspherical_energy(
    model: nn.Module,
    *,
    power: float = 2.0,
    half_space: bool = False,
    eps: float = 1e-4,
    layers: Choose = "decoupled",
    reduce: str = "sum",
) -> Measured:
    """The mean of ||w_i - w_j||^-s over the pairs i != j of each layer's normalised filters; of -log for s = 0.

    Minimum hyperspherical energy (Liu et al., 2018): filters repel each other on the sphere. A layer, or a group, of
    one filter has none. See `orthonormal` for groups and the other arguments.

    Args:
        model: a network.
        power: s; 0 for the logarithm of 1 / ||w_i - w_j||.
        half_space: repel the negatives as well, so that filters do not end up opposite each other: every filter is
            joined by its negative, and the pairs of a filter with its own negative, which are constant, are left out.
        eps: added to the squared distance, so that filters that coincide have finite energy and gradient.
        layers: as in `orthonormal`.
        reduce: as in `orthonormal`.
    """
    check_number("power", power)
    if power < 0:
        raise ValueError(f"power must be 0 or more, not {power!r}")
    check_number("eps", eps, above=0)

    def energy(cosine: Tensor) -> Tensor:
        squared = at_least(2 - 2 * cosine, 0.0) + eps
        return -0.5 * squared.log() if power == 0 else squared.pow(-0.5 * power)

    def measure(filters: Tensor) -> Tensor:
        cosines, count = _gram(filters, normalize=True), filters.shape[1]
        itself = _diagonal(cosines)
        # Masked before as well: where the energy of no distance overflows, its gradient times zero is not a number.
        cosines = cosines.masked_fill(itself, 0.0)
        pairs = (energy(cosines) + energy(-cosines)) / 2 if half_space else energy(cosines)
        return pairs.masked_fill(itself, 0.0).sum((1, 2)) / max(count * (count - 1), 1)

    return _measured(filters_of(model, layers), reduce, measure, torch.mean)


def filters_of(model: nn.Module, layers: Choose = "decoupled") -> Filters:
    """The filters of each layer that `layers` chooses as in `orthonormal`, of all shards, without a copy.

    For each group of a convolution there are its filters: [groups, filters, values].
    """
    return {name: _filters(layer) for name, layer in _chosen(model, layers).items()}


def _measured(filters: Filters, reduce: str, measure: Measure, combine: Callable[[Tensor, int], Tensor]) -> Measured:
    """Measures each group of filters and combines those of a layer; all groups of one shape are measured at once."""
    if reduce not in ("sum", "layers"):
        raise ValueError(f"reduce must be 'sum' or 'layers', not {reduce!r}")
    alike: dict[Any, list[str]] = {}
    for name, found in filters.items():
        alike.setdefault((found.shape, found.dtype, found.device), []).append(name)
    values = []
    for names in alike.values():
        stacked = torch.stack([filters[name] for name in names])
        stacked = stacked.to(accumulation_dtype(stacked.dtype))
        with torch.autocast(stacked.device.type, enabled=False):
            values.append(combine(measure(stacked.flatten(0, 1)).unflatten(0, stacked.shape[:2]), 1))
    if reduce == "sum":
        return torch.cat([value.to(values[0].device) for value in values]).sum()
    by_name = dict(zip(chain(*alike.values()), chain(*(value.unbind() for value in values)), strict=True))
    return {name: by_name[name] for name in filters}


def _chosen(model: nn.Module, layers: Choose) -> dict[str, nn.Module]:
    if layers != "decoupled" and not callable(layers):
        raise ValueError(f"layers must be 'decoupled' or a function of name and layer, not {layers!r}")
    found = {
        name: layer
        for name, layer in model.named_modules()
        if _has_filters(layer) and (layers(name, layer) if callable(layers) else isinstance(layer, Decoupled))
    }
    if not found:
        why = "`layers` chose none" if callable(layers) else "the model has no decoupled layers"
        raise ValueError(f"{why}: there are no filters to regularize; layers=lambda name, layer: True takes plain ones")
    return found


def _has_filters(layer: nn.Module) -> bool:
    # A transposed convolution has no filters that meet a patch.
    return isinstance(layer, Decoupled | nn.Linear | _ConvNd) and not isinstance(layer, _ConvTransposeNd)


def _filters(layer: nn.Module) -> Tensor:
    """The filters of each group: [groups, filters, values]."""
    weight: Any = layer.weight
    if hasattr(weight, "full_tensor"):  # sharded: a filter must meet those of the other shards
        weight = weight.full_tensor()
    # The order of the values is the same for all filters, and does not matter: as they lie, nothing has to be copied.
    last = weight.movedim(1, -1)
    weight = last if last.is_contiguous() else weight
    return weight.flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))


def _gram(filters: Tensor, normalize: bool) -> Tensor:
    """<w_i, w_j>, or cos(theta_ij), of each block: [blocks, filters, values] -> [blocks, filters, filters]."""
    products: Tensor = _Products.apply(filters)
    if not normalize:
        return products
    # The norms are on the diagonal: the filters, of which there are far more numbers, need not be divided.
    inverse = (_squared_norms(products) + NORM_EPS).rsqrt()
    return products * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)


def _squared_norms(products: Tensor) -> Tensor:
    """Their diagonal."""
    if torch.compiler.is_compiling():
        # Not as a view: torch may save it beside the products for a backward pass that writes over these first.
        return products.where(_diagonal(products), 0.0).sum(-1)
    return products.diagonal(dim1=-2, dim2=-1)


class _Products(torch.autograd.Function):
    """W W^T of each block, whose gradient is one product, where torch takes two that are each other's mirror."""

    generate_vmap_rule = True

    @staticmethod
    def forward(filters: Tensor) -> Tensor:
        return torch.bmm(filters, filters.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (filters,) = ctx.saved_tensors
        return torch.bmm(gradient + gradient.mT, filters)


def _diagonal(products: Tensor) -> Tensor:
    return torch.eye(products.shape[-1], dtype=torch.bool, device=products.device)
