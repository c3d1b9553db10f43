"""Training of unweighted layers: weight projection, weighted gradients and weight decay (Sections 4 and 5)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from dcnet.attention import DecoupledAttention
from dcnet.checks import check_number, check_whole
from dcnet.layers import Decoupled
from dcnet.losses.head import FeatureScale
from dcnet.norms import accumulation_dtype

Choose = Callable[[str, Decoupled], bool]

# Suffixes of the parameters from which torch's pruning, spectral_norm and weight_norm compute a tensor.
SOURCES = ("", "_orig", "_g", "_v")


class WeightProjection:
    """w <- s * w / ||w|| for each filter w, once in `every` steps (Section 4.1).

    Call `step` after each step of the optimizer. The output of the network stays the same up to the eps of the layers;
    gradients become those of filters of norm s (Eq. 17). The state of the optimizer is unchanged. Filters that are zero
    or not finite stay as they are. Networks wrapped by DDP or sharded by `fully_shard` need no communication for it,
    unless filters themselves are divided among processes.

    Args:
        model: its decoupled layers must be unweighted: a weighted one depends on ||w||.
        every: steps between two projections.
        norm: the norm s of filters after a projection.
        layers: a function of name and layer that selects decoupled layers; None for all.
    """

    def __init__(self, model: nn.Module, every: int = 100, norm: float = 1.0, layers: Choose | None = None):
        check_whole("every", every, least=1)
        check_number("norm", norm, above=0)
        self.every, self.norm, self.count = every, float(norm), 0
        self._layers = unweighted_layers(model, layers)

    def step(self) -> bool:
        """Counts one step of the optimizer and projects if it is due. Returns whether it did."""
        self.count += 1
        due = self.count % self.every == 0
        if due:
            self.project_()
        return due

    @torch.no_grad()
    def project_(self) -> None:
        """Projects now."""
        weights = [layer.weight for layer in self._layers]
        filters = [_local(weight) for weight in weights]
        _multiply_(filters, [_factor_to(self.norm, norm) for norm in _norms(filters, weights)])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class WeightedGradients:
    """Delta w = ||w|| * gradient for each filter w, until `remove` is called (Section 4.2, Eq. 18).

    It hooks into the optimizer; the training loop does not change. ||w|| = sqrt(sum w^2 + eps), as in the layer, so a
    zero filter still learns.

    "gradient" multiplies the gradient by ||w|| just before the step of the optimizer, after any clipping. Adam and
    similar optimizers cancel a factor on the gradient: their step does not depend on ||w|| anyway. "update" multiplies
    the step of the optimizer, including momentum and decay; under plain SGD both are the same. Under Adam, "update"
    rotates a filter by the same angle at any norm, so the norm grows exponentially: combine it with `WeightProjection`
    in long runs.

    Args:
        model: its decoupled layers must be unweighted.
        optimizer: any torch optimizer, created after the model was moved and sharded; also one prepared by accelerate.
        on: "gradient" or "update".
        layers: a function of name and layer that selects decoupled layers; None for all.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, on: str = "gradient", layers: Choose | None = None):
        if on not in ("gradient", "update"):
            raise ValueError(f"on must be 'gradient' or 'update', not {on!r}")
        optimizer = _unwrapped(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._layers = [layer for layer in unweighted_layers(model, layers) if id(layer.weight) in held]
        if not self._layers:
            raise ValueError(
                f"the {type(optimizer).__name__} has none of the filters to weight: "
                "create it from the parameters of this model, after the model was moved and sharded"
            )
        hooks = [*optimizer._optimizer_step_pre_hooks.values()]
        if any(isinstance(getattr(hook, "__self__", None), WeightedGradients) for hook in hooks):
            raise ValueError(f"the {type(optimizer).__name__} has weighted gradients already: remove() those first")
        self._before: list[Tensor] = []
        if on == "gradient":
            self._handles = [optimizer.register_step_pre_hook(self._weight_gradients)]
        else:
            self._handles = [
                optimizer.register_step_pre_hook(self._remember_filters),
                optimizer.register_step_post_hook(self._weight_update),
            ]

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _scale_gradients(self) -> None:
        learning = [layer for layer in self._layers if layer.weight.grad is not None]
        gradients = [_local(layer.weight.grad) for layer in learning]  # type: ignore[arg-type]
        weights = [layer.weight for layer in learning]
        _multiply_(gradients, _norms([_local(w) for w in weights], weights, [layer.eps for layer in learning]))

    def _weight_gradients(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            return self._scale_gradients()

        # The optimizer calls the closure to compute the gradients.
        def weighted() -> Any:
            loss = closure()
            self._scale_gradients()
            return loss

        return (own, weighted, *given[1:]), {name: value for name, value in kwargs.items() if name != "closure"}

    @torch.no_grad()
    def _remember_filters(self, *_: Any) -> None:
        self._before = [_local(layer.weight).clone() for layer in self._layers]

    @torch.no_grad()
    def _weight_update(self, *_: Any) -> None:
        before, self._before = self._before, []
        filters = [_local(layer.weight) for layer in self._layers]
        norms = _norms(before, [layer.weight for layer in self._layers], [layer.eps for layer in self._layers])
        torch._foreach_sub_(filters, before)
        torch._foreach_mul_(filters, norms)
        torch._foreach_add_(filters, before)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps, which accelerate wraps in one without hooks."""
    return optimizer if hasattr(optimizer, "_optimizer_step_pre_hooks") else getattr(optimizer, "optimizer", optimizer)


def param_groups(
    model: nn.Module, weight_decay: float, named: bool = False, weighted: bool = True
) -> list[dict[str, Any]]:
    """Two parameter groups for any torch optimizer: one with `weight_decay`, and one without (Section 5).

    Without decay: the filters of unweighted decoupled layers, whose norm has no effect; the parameters of operators
    (radius, k, scale, ...); the learned scale of a head of `dcnet.losses`; and the slopes of PReLU. All others decay:
    plain and weighted layers, biases, and the parameters of batch normalization, as in the authors' code. Every
    parameter is in one group, in the order of `model.named_parameters()`. A shared parameter decays if it does in any
    of its modules.

    Args:
        model: any network, with or without decoupled layers.
        weight_decay: the weight decay of the first group; the second has 0.
        named: add the names as `param_names`, which torch's optimizers keep.
        weighted: whether the filters of weighted decoupled layers decay.
    """
    check_model(model)
    check_number("weight_decay", weight_decay, least=0)
    computing = {id(part) for module in model.modules() for part in _exempt_parametrizations(module, weighted)}
    own = [module for module in model.modules() if id(module) not in computing]
    decaying = {id(value) for module in own for value in _decaying(module, weighted)}
    groups = []
    for decays, rate in ((True, weight_decay), (False, 0.0)):
        members = {name: value for name, value in model.named_parameters() if (id(value) in decaying) is decays}
        group = {"params": list(members.values()), "weight_decay": rate}
        groups.append({**group, "param_names": list(members)} if named else group)
    return groups


def _decaying(module: nn.Module, weighted: bool) -> list[nn.Parameter]:
    """The parameters of the module itself, without submodules, that decay."""
    if isinstance(module, nn.PReLU | FeatureScale):
        return []
    exempt = {name + ending for name in _exempt(module, weighted) for ending in SOURCES}
    return [value for name, value in module.named_parameters(recurse=False) if name not in exempt]


def _exempt(module: nn.Module, weighted: bool) -> set[str]:
    """The names of the parameters of a decoupled layer or of attention that do not decay."""
    if isinstance(module, DecoupledAttention):
        return set(module.operator.learned)
    if not isinstance(module, Decoupled):
        return set()
    decays = module.norm_matters and (weighted or not module.operator.weighted)
    return {*module.operator.learned, *(() if decays else ("weight",))}


def _exempt_parametrizations(module: nn.Module, weighted: bool) -> list[nn.Module]:
    """The parametrizations, such as weight_norm, that compute a parameter that does not decay."""
    found = [name for name in _exempt(module, weighted) if is_parametrized(module, name)]
    return [part for name in found for part in module.get_submodule(f"parametrizations.{name}").modules()]


def check_model(model: nn.Module) -> None:
    """Raises TypeError for anything but a network, such as its parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a network, an nn.Module, not {type(model).__name__}")


def unweighted_layers(model: nn.Module, choose: Choose | None) -> list[Decoupled]:
    """The selected decoupled layers, one for each weight."""
    check_model(model)
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Decoupled) and (choose is None or choose(name, layer))
    }
    if not found:
        raise ValueError("no decoupled layer is selected: the model has none, or `layers` selects none")
    for name, layer in found.items():
        if layer.operator.weighted:
            raise ValueError(
                f"layer {name!r} has the weighted operator {str(layer.operator)!r}, which depends on ||w||: "
                "exclude it with layers=lambda name, layer: not layer.operator.weighted"
            )
        if layer.norm_matters:
            raise ValueError(f"layer {name!r} blends with the plain layer, which depends on ||w||: finish_blend_ first")
        if not isinstance(layer.weight, nn.Parameter):
            raise ValueError(f"the weight of layer {name!r} must be a parameter, not computed from others")
    _check_not_shared(model, {id(layer.weight): name for name, layer in found.items()})
    return list({id(layer.weight): layer for layer in found.values()}.values())


def _check_not_shared(model: nn.Module, owners: dict[int, str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Decoupled) and not module.norm_matters:
            continue
        for value in module.parameters(recurse=False):
            if id(value) in owners:
                raise ValueError(f"layer {owners[id(value)]!r} shares its weight with {name!r}, which depends on ||w||")


def _local(tensor: Tensor) -> Tensor:
    """The filters that this process holds: all of them, or its shard."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() or placement.is_shard() for placement in placements):
        raise ValueError(f"weights and their gradients must be sharded or replicated, not {placements}")
    return tensor.to_local()  # type: ignore[attr-defined]


def _norms(filters: Sequence[Tensor], weights: Sequence[Tensor], eps: Sequence[float] | None = None) -> list[Tensor]:
    """sqrt(sum w^2 + eps) of each filter, in a shape that broadcasts with the filters, in few launches.

    `filters` are the parts of the `weights` that this process holds.
    """
    norms = [
        torch.linalg.vector_norm(w, dim=tuple(range(1, w.dim())), keepdim=True, dtype=accumulation_dtype(w.dtype))
        for w in filters
    ]
    for norm, weight in zip(norms, weights, strict=True):
        _join_shards_(norm, weight)
    if eps and norms:
        torch._foreach_pow_(norms, 2)
        torch._foreach_add_(norms, eps)
        torch._foreach_sqrt_(norms)
    return norms


def _join_shards_(norm: Tensor, weight: Tensor) -> None:
    """Combines the norms of parts of filters to norms of whole filters, if other processes hold the other parts."""
    for i, placement in enumerate(getattr(weight, "placements", ())):
        if placement.is_shard() and not placement.is_shard(0):
            dist.all_reduce(norm.square_(), group=weight.device_mesh.get_group(i))  # type: ignore[attr-defined]
            norm.sqrt_()


def _factor_to(target: float, norm: Tensor) -> Tensor:
    # Below the root of the smallest normal number, squares underflow.
    usable = (norm > torch.finfo(norm.dtype).tiny ** 0.5) & norm.isfinite()
    return torch.where(usable, target / norm, 1.0)


def _multiply_(tensors: list[Tensor], factors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_mul_(tensors, factors)
