"""How unweighted layers are trained: weight projection, weighted gradients, and what decays (Sections 4 and 5)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from dcnet.layers import Decoupled
from dcnet.learnable import check_number
from dcnet.losses.scale import FeatureScale
from dcnet.norms import accumulation_dtype

Choose = Callable[[str, Decoupled], bool]

# What a hook computes a tensor from, as torch's pruning, spectral_norm and weight_norm name it beside the tensor's own.
SOURCES = ("", "_orig", "_g", "_v")


class WeightProjection:
    """w <- s * w / ||w|| for each filter w, at every `every`-th step (Section 4.1).

    Call `step` after each step of the optimizer, whose moments are left alone. What the network computes stays the same
    up to the layers' eps; gradients become those of filters of norm s (Eq. 17). A filter that is zero or not finite is
    left as it is. Networks wrapped by DDP or sharded by `fully_shard` need no communication for it.

    Args:
        model: its decoupled layers must be unweighted: in a weighted one ||w|| is part of the function.
        every: steps from one projection to the next.
        norm: s.
        layers: says of the name and the layer whether to project it; without it, all decoupled layers are.
    """

    def __init__(self, model: nn.Module, every: int = 100, norm: float = 1.0, layers: Choose | None = None):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, 1 or more, not {every!r}")
        check_number("norm", norm, above=0)
        self.every, self.norm, self.count = every, float(norm), 0
        self._layers = _unweighted_layers(model, layers)

    def step(self) -> bool:
        """Counts one step of the optimizer, and projects where it is due; says whether it did."""
        self.count += 1
        due = self.count % self.every == 0
        if due:
            self.project_()
        return due

    @torch.no_grad()
    def project_(self) -> None:
        """Projects now, whatever the count."""
        filters = [_local(layer.weight) for layer in self._layers]
        _multiply_(filters, [_factor_to(self.norm, norm) for norm in _norms(filters)])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class WeightedGradients:
    """Delta w = ||w|| * gradient for each filter w, from here on and until `remove` (Section 4.2, Eq. 18).

    It hooks into the optimizer: the training loop stays as it is. ||w|| is the layer's own, sqrt(sum w^2 + eps), so
    that a filter that is zero still learns.

    "gradient" multiplies the gradient by ||w|| just before the optimizer sees it, after any clipping. Adam and its kin
    divide a factor on the gradient out again: their step does not depend on ||w|| in the first place. "update"
    multiplies the step that the optimizer took, whichever it is, with all that is in it (momentum, decay); under plain
    SGD the two are the same. Under Adam, "update" turns a filter by the same angle at any norm, so that the norm grows
    exponentially: combine it with `WeightProjection` in long runs.

    Args:
        model: its decoupled layers must be unweighted.
        optimizer: any optimizer of torch's kind, made from the model as it is trained (moved, sharded); one that
            accelerate has prepared will do.
        on: "gradient" or "update".
        layers: says of the name and the layer whether to weight it; without it, all decoupled layers are.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, on: str = "gradient", layers: Choose | None = None):
        if on not in ("gradient", "update"):
            raise ValueError(f"on must be 'gradient' or 'update', not {on!r}")
        optimizer = _stepping(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._layers = [layer for layer in _unweighted_layers(model, layers) if id(layer.weight) in held]
        if not self._layers:
            raise ValueError(
                f"the {type(optimizer).__name__} has none of the filters to weight: "
                "make it from the parameters of this model, after the model was moved and sharded"
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
        """Lets the optimizer step as it did before."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _scale_gradients(self) -> None:
        learning = [layer for layer in self._layers if layer.weight.grad is not None]
        gradients = [_local(layer.weight.grad) for layer in learning]  # type: ignore[arg-type]
        filters = [_local(layer.weight) for layer in learning]
        _multiply_(gradients, _norms(filters, [layer.eps for layer in learning]))

    def _weight_gradients(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            return self._scale_gradients()

        # The gradients are not there yet: the optimizer has them computed by calling the closure.
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
        norms = _norms(before, [layer.eps for layer in self._layers])
        torch._foreach_sub_(filters, before)
        torch._foreach_mul_(filters, norms)
        torch._foreach_add_(filters, before)


def _stepping(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps: accelerate's has another one take them, and no hooks of its own."""
    return optimizer if hasattr(optimizer, "_optimizer_step_pre_hooks") else getattr(optimizer, "optimizer", optimizer)


def param_groups(model: nn.Module, weight_decay: float, named: bool = False) -> list[dict[str, Any]]:
    """Two groups for any optimizer of torch: what decays, at `weight_decay`, and what does not (Section 5).

    The filters of unweighted decoupled layers do not decay, for their norm means nothing; nor does what operators learn
    (radius, k, scale, ...), nor the scale that a head of `dcnet.losses` learns, nor the slopes of PReLU. All else does:
    plain and weighted layers, biases, and the parameters of batch normalisation, as in the authors' code. Every
    parameter is in one group, in the order of `model.named_parameters()`; one that several modules share decays if it
    would in any of them.

    Args:
        model: any network, with or without decoupled layers.
        weight_decay: of the first group; the second has 0.
        named: give the names as well, as `param_names`, which torch's optimizers keep.
    """
    check_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
    computing = {id(part) for module in model.modules() for part in _exempt_parametrizations(module)}
    own = [module for module in model.modules() if id(module) not in computing]
    decaying = {id(value) for module in own for value in _decaying(module)}
    groups = []
    for decays, rate in ((True, weight_decay), (False, 0.0)):
        members = {name: value for name, value in model.named_parameters() if (id(value) in decaying) is decays}
        group = {"params": list(members.values()), "weight_decay": rate}
        groups.append({**group, "param_names": list(members)} if named else group)
    return groups


def _decaying(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module itself that decay."""
    if isinstance(module, nn.PReLU | FeatureScale):
        return []
    exempt = {name + ending for name in _exempt(module) for ending in SOURCES}
    return [value for name, value in module.named_parameters(recurse=False) if name not in exempt]


def _exempt(module: nn.Module) -> set[str]:
    """The names of what does not decay in a decoupled layer."""
    if not isinstance(module, Decoupled):
        return set()
    return {*module.operator.learned, *(() if module.norm_matters else ("weight",))}


def _exempt_parametrizations(module: nn.Module) -> list[nn.Module]:
    """What computes such values from parameters of its own, as weight_norm does."""
    found = [name for name in _exempt(module) if is_parametrized(module, name)]
    return [part for name in found for part in module.get_submodule(f"parametrizations.{name}").modules()]


def _unweighted_layers(model: nn.Module, choose: Choose | None) -> list[Decoupled]:
    """The decoupled layers that were chosen, one for each weight."""
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Decoupled) and (choose is None or choose(name, layer))
    }
    if not found:
        raise ValueError("there is no decoupled layer to work on: the model has none, or `layers` chose none")
    for name, layer in found.items():
        if layer.operator.weighted:
            raise ValueError(
                f"layer {name!r} has the weighted operator {str(layer.operator)!r}, in which ||w|| matters: "
                "take it out with layers=lambda name, layer: not layer.operator.weighted"
            )
        if layer.norm_matters:
            raise ValueError(f"layer {name!r} blends with the plain layer, in which ||w|| matters: finish_blend_ first")
        if not isinstance(layer.weight, nn.Parameter):
            raise ValueError(f"the weight of layer {name!r} is computed from others, and must be a parameter")
    _refuse_shared(model, {id(layer.weight): name for name, layer in found.items()})
    return list({id(layer.weight): layer for layer in found.values()}.values())


def _refuse_shared(model: nn.Module, owners: dict[int, str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Decoupled) and not module.norm_matters:
            continue
        for value in module.parameters(recurse=False):
            if id(value) in owners:
                raise ValueError(f"layer {owners[id(value)]!r} shares its weight with {name!r}, in which ||w|| matters")


def _local(tensor: Tensor) -> Tensor:
    """The filters that this process holds: all of them, or its shard of whole filters."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        raise ValueError(f"weights must be sharded along dimension 0, between filters, not as {placements}")
    return tensor.to_local()  # type: ignore[attr-defined]


def _norms(filters: Sequence[Tensor], eps: Sequence[float] | None = None) -> list[Tensor]:
    """sqrt(sum w^2 + eps) of each filter, in the shape in which it meets the filters, in few launches."""
    norms = [
        torch.linalg.vector_norm(w, dim=tuple(range(1, w.dim())), keepdim=True, dtype=accumulation_dtype(w.dtype))
        for w in filters
    ]
    if eps and norms:
        torch._foreach_pow_(norms, 2)
        torch._foreach_add_(norms, eps)
        torch._foreach_sqrt_(norms)
    return norms


def _factor_to(target: float, norm: Tensor) -> Tensor:
    # Below the root of the smallest number the squares have lost all their digits.
    usable = (norm > torch.finfo(norm.dtype).tiny ** 0.5) & norm.isfinite()
    return torch.where(usable, target / norm, 1.0)


def _multiply_(tensors: list[Tensor], factors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_mul_(tensors, factors)
