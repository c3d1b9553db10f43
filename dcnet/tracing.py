"""Layers that must be called: torch.fx must not trace into them, and nothing may use their weight without a call.

A decoupled layer is a subclass of torch's own, with the same `weight` and `bias`. Code that reads these and multiplies
by itself would silently compute the plain layer."""

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook

# The key of our hook; torch uses keys from 0 on.
MARK = -1


def is_symbolic(value: Any) -> bool:
    """Whether torch.fx is tracing and the value is a placeholder."""
    return isinstance(value, fx.Proxy)


class Opaque(nn.Module):
    """A layer that must be called.

    torch.fx records a call of the layer, as it does for torch's own layers. `nn.TransformerEncoderLayer` calls a linear
    layer in evaluation only if it is marked by `mark_`; otherwise it uses the weight directly. `nn.MultiheadAttention`
    never calls its `out_proj`, which therefore cannot be decoupled.
    """

    @property
    def itself(self) -> "Opaque":
        """The layer itself: a name that torch.fx can look up if it traces the layer alone."""
        return self

    def forward(self, input: Tensor) -> Tensor:
        return record_call(self, input) if is_symbolic(input) else self.compute(input)

    # A subclass in dcnet that overrides `forward` sets this as well.
    own_forward = forward

    def unhooked(self, *inputs: Any) -> Tensor:
        """The output without hooks and without the `forward` of a user's subclass."""
        return self.own_forward(*inputs)

    def compute(self, input: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define compute(input)")


def record_call(layer: Opaque, *inputs: Any) -> Any:
    """Records one call of the layer in the graph that is being traced."""
    tracer = next(each.tracer for each in inputs if is_symbolic(each))
    path = tracer.path_of_module(layer) or "itself"
    if type(layer).forward is type(layer).own_forward and not has_hooks(layer):
        return tracer.create_proxy("call_module", path, inputs, {})
    # Hooks and the forward of a subclass are traced already; a call of the layer would run both again.
    found = tracer.create_proxy("get_attr", path, (), {})
    return tracer.create_proxy("call_method", "unhooked", (found, *inputs), {})


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks; the mark does not count."""
    return bool(module._forward_hooks or module._forward_pre_hooks.keys() - {MARK})


def _changes_nothing(module: nn.Module, args: Any) -> None:
    """The hook that marks a layer; it does nothing."""


def mark_(layer: nn.Module) -> None:
    """Makes `nn.TransformerEncoderLayer` call the layer: it skips its fast path if a layer has a hook."""
    layer._forward_pre_hooks[MARK] = _changes_nothing


def unmark_(layer: nn.Module) -> None:
    """Removes the mark: the weight of the layer may be used without a call."""
    layer._forward_pre_hooks.pop(MARK, None)


def _check_registration(module: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Called by torch for each module that is added to another one."""
    if isinstance(layer, Opaque) and isinstance(module, nn.MultiheadAttention) and name == "out_proj":
        raise ValueError(
            f"{name} of {type(module).__name__} cannot be a {type(layer).__name__}: attention uses the weight of "
            f"{name} without calling the layer, so give it an nn.Linear"
        )


register_module_module_registration_hook(_check_registration)
