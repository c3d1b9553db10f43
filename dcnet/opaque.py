"""Layers that torch has to call: torch.fx must not trace into them, and nothing may use their weight without a call.

A decoupled layer is a subclass of torch's own, with the same `weight` and `bias`. Code that reads these and multiplies
by itself would silently compute the plain layer.
"""

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook

# The key of a hook that torch does not give out: it counts from 0.
MARK = -1


def is_symbolic(value: Any) -> bool:
    """Whether torch.fx is tracing, and the value stands for a tensor that is not there yet."""
    return isinstance(value, fx.Proxy)


class Opaque(nn.Module):
    """A layer that torch has to call.

    torch.fx records a call of the layer, as it does for torch's own layers. `nn.TransformerEncoderLayer` calls a linear
    layer in evaluation too if the layer is marked by `mark_`; otherwise it uses the weight by itself.
    `nn.MultiheadAttention` never calls its layers, and cannot take one.
    """

    @property
    def itself(self) -> "Opaque":
        """The layer, by a name that torch.fx can look up where the layer is all that is traced."""
        return self

    def forward(self, input: Tensor) -> Tensor:
        return _record_call(self, input) if is_symbolic(input) else self.compute(input)

    def unhooked(self, input: Tensor) -> Tensor:
        """What the layer computes without its hooks, whatever a subclass makes of `forward`."""
        return Opaque.forward(self, input)

    def compute(self, input: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what it computes")


def _record_call(layer: Opaque, input: Any) -> Any:
    """Records one call of the layer in the graph that is being traced."""
    tracer = input.tracer
    path = tracer.path_of_module(layer) or "itself"
    if type(layer).forward is Opaque.forward and not has_hooks(layer):
        return tracer.create_proxy("call_module", path, (input,), {})
    # Hooks, and what a subclass does around this, are traced already, and a call of the layer would do both again.
    found = tracer.create_proxy("get_attr", path, (), {})
    return tracer.create_proxy("call_method", "unhooked", (found, input), {})


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks may see or change what goes through the module; the mark is none of them."""
    return bool(module._forward_hooks or module._forward_pre_hooks.keys() - {MARK})


def _changes_nothing(module: nn.Module, args: Any) -> None:
    """The hook that is the mark."""


def mark_(layer: nn.Module) -> None:
    """Makes `nn.TransformerEncoderLayer` call the layer: it does without its fast path where a layer has a hook."""
    layer._forward_pre_hooks[MARK] = _changes_nothing


def unmark_(layer: nn.Module) -> None:
    """Makes the layer one again whose weight may be used without calling it."""
    layer._forward_pre_hooks.pop(MARK, None)


def _check_registration(module: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Called by torch for each module that is put into another one."""
    if isinstance(layer, Opaque) and isinstance(module, nn.MultiheadAttention):
        raise ValueError(
            f"{name} of {type(module).__name__} cannot be a {type(layer).__name__}: attention uses the weight of "
            f"{name} without calling the layer, so give it an nn.Linear"
        )


register_module_module_registration_hook(_check_registration)
