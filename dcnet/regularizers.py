"""Regularizers: orthonormal, orthogonal and hyperspherical energy of filters (Section 5), and feature incay."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dcnet.checks import check_number
from dcnet.clamp import at_least
from dcnet.kernels import penalty_gradient_
from dcnet.layers import Decoupled
from dcnet.norms import accumulation_dtype

# Far below the squared norm of any filter except a zero one.
NORM_EPS = 1e-12

Choose = str | Callable[[str, nn.Module], bool]
Filters = dict[str, Tensor]
Measure = Callable[[Tensor], Tensor]
# A scalar, or a dict with one per layer. Any, since a union would have to be narrowed wherever it is added to a loss.
Measured = Any


def orthonormal(
    model: nn.Module, *, normalize: bool = True, layers: Choose = "decoupled", reduce: str = "sum"
) -> Measured:
    """||W^T W - I||_F^2 of each layer; the columns of W are its filters (Section 5).

    The authors add it to the loss with a factor of 1e-5 / 2: `loss + 0.5e-5 * dcnet.regularizers.orthonormal(model)`.

    Filters of different groups of a convolution are not compared. The result is in float32 or better, also under
    autocast.

    Args:
        model: a network.
        normalize: use w / ||w|| instead of w. The diagonal is then zero, and the norms are not regularized.
        layers: "decoupled", or a function of name and layer that selects among all decoupled, convolutional and linear
            layers.
        reduce: "sum" over the layers, or "layers" for a dict with the value of each layer.
    """

    def measure(filters: Tensor) -> Tensor:
        products = _gram(filters, normalize)
        return (products - torch.eye(products.shape[-1], device=products.device)).square().sum((1, 2))

    return _measured(filters_of(model, layers), reduce, measure, torch.sum)


@torch.no_grad()
def orthonormal_backward_(model: nn.Module, factor: float = 1.0, *, layers: Choose = "decoupled") -> None:
    """Adds the gradient of `factor * orthonormal(model)` to the gradients of the filters, in few kernel launches.

    It does what `(factor * orthonormal(model)).backward()` does. Call it after the backward pass of the loss. Every
    weight must be a parameter of one layer only, without hooks on its gradient, and not be sharded over processes.
    """
    if not has_direct_gradients(model, layers):
        raise ValueError("some weights are computed, shared, hooked or sharded: add orthonormal(model) to the loss")
    weights: dict[str, Any] = {name: layer.weight for name, layer in _chosen(model, layers).items()}
    filters = {name: found for name, found in filters_of(model, layers).items() if weights[name].requires_grad}
    for names in _alike(filters).values():
        found = _orthonormal_gradients(torch.stack([filters[name] for name in names]), factor)
        same = [weights[name] for name in names]
        _add_gradients_(same, [_like_weight(one, weight) for one, weight in zip(found, same, strict=True)])


def has_direct_gradients(model: nn.Module, layers: Choose = "decoupled") -> bool:
    """Whether `orthonormal_backward_` supports the weights: parameters of one layer each, without shards and hooks."""
    weights: list[Any] = [layer.weight for layer in _chosen(model, layers).values()]
    own = all(isinstance(weight, nn.Parameter) and not hasattr(weight, "device_mesh") for weight in weights)
    hooked = any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights)
    return own and not hooked and len({id(weight) for weight in weights}) == len(weights)


def _orthonormal_gradients(filters: Tensor, factor: float) -> tuple[Tensor, ...]:
    """The gradients of `factor * ||W^T W - I||_F^2`, W normalized, of filters [layers, groups, filters, values]."""
    stacked = filters.to(accumulation_dtype(filters.dtype)).flatten(0, 1)
    with torch.autocast(stacked.device.type, enabled=False):
        products = torch.bmm(stacked, stacked.mT)
        inverse = (_squared_norms(products) + NORM_EPS).rsqrt()
        by_products = penalty_gradient_(products, inverse)
        # Twice, since a filter is in a row and in a column of the products.
        found = torch.baddbmm(stacked.new_zeros(()), by_products, stacked, beta=0, alpha=2 * factor)
    return found.to(filters.dtype).view(filters.shape).unbind()


def _like_weight(filters: Tensor, weight: Tensor) -> Tensor:
    """Filters in the order of `_filters`, in shape and layout of the weight."""
    last = weight.movedim(1, -1)
    return filters.view(last.shape).movedim(-1, 1) if last.is_contiguous() else filters.view(weight.shape)


def _add_gradients_(weights: list[Tensor], gradients: list[Tensor]) -> None:
    totals = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    torch._foreach_add_(totals, gradients)
    for weight, total in zip(weights, totals, strict=True):
        weight.grad = total


def orthogonal(
    model: nn.Module, *, normalize: bool = False, layers: Choose = "decoupled", reduce: str = "sum"
) -> Measured:
    """||W^T W - diag(W^T W)||_F^2 of each layer; the columns of W are its filters (Section 5).

    Arguments are those of `orthonormal`, to which it is equal for normalized filters.
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
    """The mean of ||w_i - w_j||^-s over pairs i != j of the normalized filters of each layer; for s = 0, of -log.

    Minimum hyperspherical energy (Liu et al., 2018): filters repel each other on the sphere. A layer or group with one
    filter has energy 0. See `orthonormal` for groups and the other arguments.

    Args:
        model: a network.
        power: s; 0 for the logarithm of 1 / ||w_i - w_j||.
        half_space: add the negative of every filter, so that filters do not end up opposite each other. The constant
            pairs of a filter with its own negative are left out.
        eps: added to the squared distance, so that equal filters have finite energy and gradient.
        layers: as in `orthonormal`.
        reduce: as in `orthonormal`.
    """
    check_number("power", power, least=0)
    check_number("eps", eps, above=0)

    def energy(cosine: Tensor) -> Tensor:
        squared = at_least(2 - 2 * cosine, 0.0) + eps
        return -0.5 * squared.log() if power == 0 else squared.pow(-0.5 * power)

    def measure(filters: Tensor) -> Tensor:
        cosines, count = _gram(filters, normalize=True), filters.shape[1]
        itself = _diagonal(cosines)
        # Also masked before the energy: if that overflows at distance 0, its gradient times zero is NaN.
        cosines = cosines.masked_fill(itself, 0.0)
        pairs = (energy(cosines) + energy(-cosines)) / 2 if half_space else energy(cosines)
        return pairs.masked_fill(itself, 0.0).sum((1, 2)) / max(count * (count - 1), 1)

    return _measured(filters_of(model, layers), reduce, measure, torch.mean)


def filters_of(model: nn.Module, layers: Choose = "decoupled") -> Filters:
    """The filters [groups, filters, values] of each layer that `layers` selects as in `orthonormal`, without a copy.

    Filters that are sharded over processes are gathered.
    """
    return {name: _filters(layer) for name, layer in _chosen(model, layers).items()}


def _measured(filters: Filters, reduce: str, measure: Measure, combine: Callable[[Tensor, int], Tensor]) -> Measured:
    """Measures each group of filters and combines the groups of a layer; groups of one shape are measured together."""
    if reduce not in ("sum", "layers"):
        raise ValueError(f"reduce must be 'sum' or 'layers', not {reduce!r}")
    alike, values = _alike(filters), []
    for names in alike.values():
        stacked = torch.stack([filters[name] for name in names])
        stacked = stacked.to(accumulation_dtype(stacked.dtype))
        with torch.autocast(stacked.device.type, enabled=False):
            values.append(combine(measure(stacked.flatten(0, 1)).unflatten(0, stacked.shape[:2]), 1))
    if reduce == "sum":
        return torch.cat([value.to(values[0].device) for value in values]).sum()
    by_name = dict(zip(chain(*alike.values()), chain(*(value.unbind() for value in values)), strict=True))
    return {name: by_name[name] for name in filters}


def _alike(filters: Filters) -> dict[Any, list[str]]:
    """The names of the layers whose filters have the same shape, dtype and device."""
    alike: dict[Any, list[str]] = {}
    for name, found in filters.items():
        alike.setdefault((found.shape, found.dtype, found.device), []).append(name)
    return alike


def _chosen(model: nn.Module, layers: Choose) -> dict[str, nn.Module]:
    if layers != "decoupled" and not callable(layers):
        raise ValueError(f"layers must be 'decoupled' or a function of name and layer, not {layers!r}")
    found = {
        name: layer
        for name, layer in model.named_modules()
        if _has_filters(layer) and (layers(name, layer) if callable(layers) else isinstance(layer, Decoupled))
    }
    if not found:
        why = "`layers` selects none" if callable(layers) else "the model has no decoupled layers"
        raise ValueError(f"{why}: there are no filters to regularize; layers=lambda name, layer: True takes plain ones")
    return found


def _has_filters(layer: nn.Module) -> bool:
    # The filters of a transposed convolution are not applied to patches.
    return isinstance(layer, Decoupled | nn.Linear | _ConvNd) and not isinstance(layer, _ConvTransposeNd)


def _filters(layer: nn.Module) -> Tensor:
    """The filters of each group: [groups, filters, values]."""
    weight: Any = layer.weight
    if hasattr(weight, "full_tensor"):  # sharded: filters are compared across shards
        weight = weight.full_tensor()
    # Any order of the values will do if it is the same for all filters: the order in memory needs no copy.
    last = weight.movedim(1, -1)
    weight = last if last.is_contiguous() else weight
    return weight.flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))


def _gram(filters: Tensor, normalize: bool) -> Tensor:
    """<w_i, w_j>, or cos(theta_ij), of each block: [blocks, filters, values] -> [blocks, filters, filters]."""
    products: Tensor = _Products.apply(filters)
    if not normalize:
        return products
    # The norms are on the diagonal: dividing the products is cheaper than dividing the filters.
    inverse = (_squared_norms(products) + NORM_EPS).rsqrt()
    return products * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)


def _squared_norms(products: Tensor) -> Tensor:
    """The squared norms of the filters: the diagonal of their products."""
    if torch.compiler.is_compiling():
        # Not a view: torch may save it with the products for a backward pass that overwrites them first.
        return products.where(_diagonal(products), 0.0).sum(-1)
    return products.diagonal(dim1=-2, dim2=-1)


class _Products(torch.autograd.Function):
    """W W^T of each block; its gradient takes one product instead of two, which are transposes of each other."""

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


def feature_incay(features: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean of 1 / (||x||^2 + eps), to be added to a loss: it makes features grow, small ones most.

    Feature incay (Yuan et al., 2017) is the opposite of weight decay, for features. Use it with losses that depend on
    ||x||.

    Args:
        features: [N, D]; the mean over an empty batch is nan.
        eps: keeps value and gradient finite for zero features.
    """
    if features.dim() != 2:
        raise ValueError(f"features must be [N, features], not {list(features.shape)}")
    features = features.to(accumulation_dtype(features.dtype))
    return (1 / (features.square().sum(1) + eps)).mean()
