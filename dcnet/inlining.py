"""Traces the forward of a module with that of inner modules inlined, unless the graph would compute something else."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, fx, nn

from dcnet.tracing import has_hooks

# An attribute of the `forward` that `dcnet.fuse` gives to modules: this function itself.
FUSED = "is_fused"
# The class that `has_activation` knows; timm is not imported.
TIMM_NORM = ("timm.layers.norm_act", "BatchNormAct2d")
# The devices whose mode of autocast a forward may read.
DEVICES = ("cpu", "cuda")
# operator.iadd, operator.imul, ...
IN_PLACE = {getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])}


def trace(module: nn.Module, leaves: set[nn.Module]) -> tuple[fx.Graph, list[nn.Module]]:
    """The graph of the forward with calls of the leaves only, and the modules that were inlined.

    Raises UntraceableError if the graph would compute something else than the forward: if the forward changes the state
    of a module or the mode of autograd or autocast, reads the training mode, draws random numbers, or gives another
    graph in another mode. A forward may raise any other error when it is traced.
    """
    tracer, before = InliningTracer(leaves), _random_states()
    with _isolated(module), _unreadable_mode():
        graph = tracer.trace(module)
        with _other_modes():
            again = InliningTracer(leaves).trace(module)
    if _random_states() != before:
        raise UntraceableError("draws random numbers")
    if _nodes(graph) != _nodes(again):
        raise UntraceableError("depends on the mode of autograd or autocast")
    return graph, list(tracer.inlined)


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in graph.nodes]


class UntraceableError(Exception):
    """The graph of a forward would compute something else than the forward."""


class TensorProxy(fx.Proxy):
    """A proxy that passes for a tensor in isinstance, and records `x += y` as in place; that of torch.fx as `x + y`."""

    __class__ = property(lambda self: Tensor)
    # Not an nn.Parameter, and not an nn.Buffer.
    _is_param = _is_buffer = False


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", function, (proxy, other), {})


for _function in IN_PLACE:
    setattr(TensorProxy, f"__{_function.__name__}__", _recorded(_function))


class InliningTracer(fx.Tracer):
    """Traces into all modules but the given leaves, and records which these are."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: set[nn.Module]):
        # torch.fx would wrap the functions of `math`, which a compiler must not see if it is imported in the meantime.
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.leaves, self.inlined, self.modes = leaves, dict[nn.Module, None](), _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if isinstance(a, fx.Proxy) else super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph does not record contexts such as torch.no_grad.
        if _modes() != self.modes:
            raise UntraceableError("changes the mode of autograd or autocast")
        return super().create_node(*args, **kwargs)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_activation(m) and m in self.leaves:
            self.inlined[m] = None
            return m.act(m.drop(super().call_module(m, forward, args, kwargs)))
        if m in self.leaves:
            return super().call_module(m, forward, args, kwargs)
        if m in (self.submodule_paths or {}):
            self.inlined[m] = None
        # A slice such as `self.blocks[:2]` is a new nn.Sequential.
        elif type(m) is not nn.Sequential:
            raise UntraceableError(f"calls a {type(m).__name__} that is not one of its modules")
        return forward(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _modes() -> tuple[Any, ...]:
    """The modes of autograd and autocast."""
    modes: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    for device in DEVICES:
        modes += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    return tuple(modes)


@contextlib.contextmanager
def _other_modes() -> Iterator[None]:
    """The opposite modes of autograd and autocast."""
    before = {device: torch.is_autocast_enabled(device) for device in DEVICES}
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        try:
            for device, enabled in before.items():
                torch.set_autocast_enabled(device, not enabled)
            yield
        finally:
            for device, enabled in before.items():
                torch.set_autocast_enabled(device, enabled)


def _random_states() -> list[Any]:
    """The states of the random number generators of Python, NumPy and torch."""
    numpy: Any = np.random.get_state()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [random.getstate(), numpy[1].tobytes(), numpy[2:], *(state.numpy().tobytes() for state in states)]


class _Unreadable:
    """An attribute of a class that cannot be read, not even by `getattr` with a default."""

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        raise UntraceableError("depends on the training mode")


@contextlib.contextmanager
def _unreadable_mode() -> Iterator[None]:
    """Reading `training` is an error for modules that do not have this attribute themselves, as in `_isolated`."""
    kind: Any = nn.Module
    kind.training = _Unreadable()
    try:
        yield
    finally:
        del kind.training


@contextlib.contextmanager
def _isolated(root: nn.Module) -> Iterator[None]:
    """Modules have a copy of their state without `training`; raises UntraceableError if the forward changes it.

    The graph would neither change the state nor follow the mode.
    """
    modules = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = {module: vars(module) for module in modules}
    try:
        for module, state in before.items():
            copied = {
                name: copy.copy(value) if isinstance(value, list | dict | set) else value
                for name, value in state.items()
            }
            copied.pop("training", None)
            module.__dict__ = copied
        yield
        changed = [module for module, state in before.items() if _without_mode(state) != _contents(vars(module))]
    finally:
        for module, state in before.items():
            module.__dict__ = state
    if changed:
        raise UntraceableError("changes the state of the module")


def _without_mode(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _contents(state).items() if name != "training"}


def _contents(state: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of all values, also of those in lists, dicts and sets."""
    return {name: _identity(value) for name, value in state.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return [*map(id, value)] if isinstance(value, list | set) else id(value)


def is_hooked(module: nn.Module) -> bool:
    return bool(has_hooks(module) or module._backward_hooks or module._backward_pre_hooks)


def is_fused(module: nn.Module) -> bool:
    """Whether `dcnet.fuse` has set the forward of this module."""
    function = getattr(vars(module).get("forward"), "__func__", None)
    # A wrapper of another library copies the attribute.
    return function is not None and getattr(function, FUSED, None) is function


def is_replaced(module: nn.Module) -> bool:
    """Whether something other than `dcnet.fuse` has replaced the forward of the module."""
    forward = vars(module).get("forward")
    # A loaded pickle of a fused module holds the forward of its class.
    own = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return not own and not is_fused(module)


def has_activation(module: nn.Module) -> TypeGuard[Any]:
    """Whether the module is a batch normalization of timm with an activation inside, as in EfficientNet and RegNet.

    A graph has its parts: calls of the module stand for the normalization alone, see `NormAlone`.
    """
    kind = type(module)
    return (kind.__module__, kind.__name__) == TIMM_NORM and not is_changed(module)


class NormAlone(nn.Module):
    """The normalization of a module that also has an activation."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        # In a tuple, since the norm is no submodule: the graph may set its activation as an attribute of this one.
        self.norm = (norm,)

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self.norm[0], x)


def is_changed(module: nn.Module) -> bool:
    """Whether a call does something else than the forward of the class."""
    return is_hooked(module) or is_replaced(module)


def varies(module: nn.Module) -> str:
    """Why calls of the module may run different code, or ""."""
    if is_replaced(module):
        return "was replaced"
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    optional = [
        one.name for one in parameters if one.kind is not one.POSITIONAL_OR_KEYWORD or one.default is not one.empty
    ]
    return f"has an optional argument, {optional[0]!r}" if optional else ""


def cause(error: Exception) -> str:
    """Why a forward cannot be traced."""
    if isinstance(error, UntraceableError):
        return str(error)
    return f"cannot be traced: {str(error).partition(chr(10))[0] or type(error).__name__}"
