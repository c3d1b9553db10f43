"""Optimizers with a special update for filters: Muon, which orthogonalizes updates, and SGD on the unit sphere.

All other parameters, such as biases, radii, batch normalization and the classifier, are updated by AdamW in the same
optimizer. Steps never wait for the device, so a CUDA graph can capture them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from dcnet.checks import check_number
from dcnet.norms import accumulation_dtype
from dcnet.optim import Choose, check_model, param_groups, unweighted_layers

# The defaults of AdamW.
BETAS, EPS = (0.9, 0.999), 1e-8
# Newton-Schulz iteration, as in torch.optim.Muon: coefficients of X, X X'X and X (X'X)^2, and number of iterations.
NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
SMALLEST_NORM = 1e-7
# The root mean square of an update of AdamW, which Muon's updates are scaled to.
ADAMW_RMS = 0.2
# An angle of 0.03 turns a filter of 900 values by as much as AdamW with a rate of 0.001 typically does.
OTHER_RATE = 1 / 30


class FilterOptimizer(Optimizer):
    """The base of optimizers of filters; subclasses implement `update`.

    Filters of the same size are stacked, so that a step needs few kernel launches. Filters in half precision are
    updated in float32, and rounded. If `found_inf` is set to a tensor, a step changes nothing while the tensor is 1.
    Parameters of groups that are added later are updated by AdamW, unless the group has `filters=True`.

    Args:
        model: the network; `dcnet.optim.param_groups` decides which of its parameters decay.
        filters: ids of the parameters to update as filters.
        lr: learning rate of filters, a number or a tensor.
        momentum: momentum of filters.
        weight_decay: decoupled weight decay, as in AdamW.
        other_rate: multiplies the learning rate of all other parameters.
        weighted: whether the filters of weighted operators decay.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        filters: set[int],
        lr: float | Tensor,
        momentum: float,
        weight_decay: float,
        other_rate: float,
        weighted: bool = True,
    ):
        check_number("lr", float(lr), above=0)
        check_number("momentum", momentum, least=0, below=1)
        check_number("other_rate", other_rate, above=0)
        self.other_rate = other_rate
        groups = [
            {**group, "params": members, "filters": chosen}
            for group in param_groups(model, weight_decay, weighted=weighted)
            for chosen in (True, False)
            if (members := [value for value in group["params"] if (id(value) in filters) is chosen])
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "filters": False, "fused": True})

    def update(
        self, filters: Tensor, gradients: Tensor, momenta: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns the new filters and momenta; all tensors are [layers, filters, values]."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient; returns the result of the closure, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [value for value in group["params"] if value.grad is not None]
            if group["filters"]:
                self._step_filters(learning, group)
            elif learning:
                self._step_others(learning, group)
        return loss

    def _step_filters(self, learning: list[Tensor], group: dict[str, Any]) -> None:
        by_size: dict[tuple[torch.device, tuple[int, int]], list[Tensor]] = {}
        for value in learning:
            by_size.setdefault((value.device, (value.shape[0], value[0].numel())), []).append(value)
        for (_, size), filters in by_size.items():
            momenta = [self._zeros(value, "momentum_buffer") for value in filters]
            weights, moments = _stacked(filters, size), _stacked(momenta, size)
            gradients = _stacked([value.grad for value in filters], size)
            after = self.update(weights, gradients, moments, group)
            for own, old, new in ((filters, weights, after[0]), (momenta, moments, after[1])):
                kept = new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)
                torch._foreach_copy_(own, [part.view(value.shape) for part, value in zip(kept, own, strict=True)])

    def _step_others(self, learning: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[value] for value in learning]
        for value, state in zip(learning, states, strict=True):
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
        adamw(
            learning,
            [value.grad for value in learning if value.grad is not None],
            [self._zeros(value, "exp_avg") for value in learning],
            [self._zeros(value, "exp_avg_sq") for value in learning],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=group["lr"] * self.other_rate,
            weight_decay=group["weight_decay"],
            eps=EPS,
            maximize=False,
        )

    def _zeros(self, value: Tensor, name: str) -> Tensor:
        """Returns a tensor of the state of a parameter, which starts as zeros."""
        state = self.state[value]
        if name not in state:
            state[name] = torch.zeros_like(value, memory_format=torch.preserve_format)
        return state[name]


def _stacked(tensors: list[Any], size: tuple[int, int]) -> Tensor:
    stacked = torch.stack([tensor.reshape(size) for tensor in tensors])
    return stacked.to(accumulation_dtype(stacked.dtype))


class Muon(FilterOptimizer):
    """Replaces the update of the filters of a layer by the nearest matrix with orthonormal rows or columns.

    The filters of a layer are a matrix [filters, values of a filter]. The update is Nesterov momentum, which a
    Newton-Schulz iteration (in bfloat16 on a GPU) orthogonalizes. It has the root mean square of an update of AdamW, so
    one learning rate serves both. On matrices it computes the same as
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, but without waiting for the device. The last parameter with two
    dimensions or more belongs to the classifier, and is updated by AdamW.

    Args:
        model: the network, plain or decoupled.
        lr: learning rate.
        momentum: momentum of filters.
        weight_decay: decoupled weight decay; unweighted decoupled filters do not decay.
        weighted: whether the filters of weighted operators decay.
        other_rate: multiplies the learning rate of all other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        weighted: bool = True,
        other_rate: float = 1.0,
    ):
        super().__init__(model, _filters(model), lr, momentum, weight_decay, other_rate, weighted)

    def update(
        self, filters: Tensor, gradients: Tensor, momenta: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        rate, momentum = group["lr"], group["momentum"]
        averaged = momenta.lerp(gradients, 1 - momentum)
        direction = orthogonalize(gradients.lerp(averaged, momentum))
        scale = ADAMW_RMS * math.sqrt(max(filters.shape[1:]))
        return filters * (1 - rate * group["weight_decay"]) - rate * scale * direction, averaged


def _filters(model: nn.Module) -> set[int]:
    """Returns the ids of the weights of linear and convolutional layers, without the classifier."""
    check_model(model)
    matrices = [id(value) for value in model.parameters() if value.dim() > 1]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    return {id(layer.weight) for layer in layers} & set(matrices[:-1])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximates U V' for every matrix U S V' of [..., rows, columns]; singular values become 0.7 to 1.2."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    found = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    found = found.bfloat16() if found.is_cuda else found
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        squares = found @ found.mT
        found = a * found + (b * squares + c * squares @ squares) @ found
    return (found if wide is matrices else found.mT).to(matrices.dtype)


class SphereSGD(FilterOptimizer):
    """Rotates each filter of unweighted decoupled layers by the angle `lr`, in radians, on the unit sphere.

    The norm of these filters has no effect, so the length of a step is an angle, the same for all widths and depths:
    w <- cos(lr) w - sin(lr) m / ||m||, where m is the momentum of the gradient, tangent to the sphere at w. The
    momentum moves along with the filter by parallel transport. Filters have norm 1 from the first step on.

    Args:
        model: its decoupled layers must be unweighted: a weighted one depends on ||w||.
        lr: the angle of a step.
        momentum: momentum of filters.
        weight_decay: decoupled weight decay of other parameters; filters do not decay, since it would have no effect.
        other_rate: the learning rate of AdamW for other parameters is `lr * other_rate`.
        layers: a function of name and layer that selects decoupled layers; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.03,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        other_rate: float = OTHER_RATE,
        layers: Choose | None = None,
    ):
        filters = {id(layer.weight) for layer in unweighted_layers(model, layers)}
        super().__init__(model, filters, lr, momentum, weight_decay, other_rate)

    def update(
        self, filters: Tensor, gradients: Tensor, momenta: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        smallest = torch.finfo(filters.dtype).tiny ** 0.5
        angle = torch.as_tensor(group["lr"], dtype=filters.dtype, device=filters.device)
        cos, sin = angle.cos(), angle.sin()
        unit = filters / _norm(filters).clamp(min=smallest)
        tangent = group["momentum"] * momenta + gradients
        tangent = tangent - (tangent * unit).sum(-1, keepdim=True) * unit
        size = _norm(tangent)
        rotated = cos * unit - sin * tangent / size.clamp(min=smallest)
        # A filter without a gradient stays where it is.
        return torch.where(size > smallest, rotated, unit), cos * tangent + sin * size * unit


def _norm(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
