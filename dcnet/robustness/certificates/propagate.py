"""Propagation of bounds through a network: by its known structure, or by a trace of its `forward`."""

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcnet.inference.fold_network import OneLevel
from dcnet.inlining import is_replaced
from dcnet.models.blocks import MarginNetwork, Network, Normalized
from dcnet.robustness.certificates.matrices import Signal
from dcnet.robustness.certificates.plain_rules import added, flatten, head_logits, relu, rule_of
from dcnet.tracing import has_hooks


class _InPlaceProxy(fx.Proxy):
    """A proxy that records `+=` as an in-place operation; torch would record an addition."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(OneLevel):
    """Traces one level, including in-place operations."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlaceProxy(node, self)


def _trace(module: nn.Module) -> fx.Graph:
    """The graph of the module's forward in its current mode."""
    try:
        return _Tracer().trace(module)
    # With proxies, a forward may raise any error.
    except Exception as error:
        raise ValueError(f"has a forward that cannot be traced: {error}") from None


class _InPlaceDetector(fx.Interpreter):
    """Runs a graph and records the first value that is used after a change in place.

    The version counter of a tensor includes changes by views and by modules.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph):
        super().__init__(module, graph=graph)
        self.changes: dict[fx.Node, int] = {}
        self.stale: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        used = [given for given in n.all_input_nodes if self.env[given]._version != self.changes[given]]
        self.stale = self.stale or next(iter(used), None)
        found = super().run_node(n)
        self.changes[n] = found._version
        return found

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A compiled module would be compiled again for this image.
        module = self.fetch_attr(target)
        return getattr(module, "_orig_mod", module)(*args, **kwargs)


def _check_in_place(module: nn.Module, graph: fx.Graph, shape: Sequence[int]) -> None:
    """Raises ValueError if a value is used after a change in place, since a node of the graph has one value.

    Args:
        module: a module in evaluation mode.
        graph: the graph of its forward, in which all values are tensors.
        shape: the shape of its input, without the batch.
    """
    detector = _InPlaceDetector(module, graph)
    try:
        detector.run(torch.zeros(1, *shape, **_dtype_and_device(module)))
    # A forward may raise any error.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"has a forward that fails for an image of shape {list(shape)}: {reason}") from None
    if detector.stale is not None:
        raise ValueError(
            f"changes {_name(detector.stale)} in place in its forward, and uses it afterwards: make a new value, as in "
            "y = y + x"
        )


def _dtype_and_device(module: nn.Module) -> dict[str, Any]:
    """The dtype and device of the module, as keyword arguments."""
    tensors: chain[Tensor] = chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    return {"dtype": like.dtype, "device": like.device}


def _name(node: fx.Node) -> str:
    """The function that a node calls, or its target."""
    return repr(getattr(node.target, "__name__", str(node.target)))


Found = TypeVar("Found")
# Functions and methods that a traced forward may call.
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
FLATTENINGS = (torch.flatten, "flatten")
IDENTITIES = ("contiguous",)


def visit(module: nn.Module, signal: Signal, name: str = "") -> Signal:
    """The bounds after a module in evaluation mode; raises ValueError with the name of a layer that has no rule."""
    module = getattr(module, "_orig_mod", module)
    if has_hooks(module):
        raise not_covered(module, name, "has hooks, which may change what it computes")
    if is_replaced(module):
        raise not_covered(module, name, "has a forward other than that of its class")
    rule, steps = rule_of(module), _steps(module)
    if rule is not None:
        return _apply(module, functools.partial(rule, module), signal, name)
    if steps is None:
        return _follow(module, signal, name)
    for own, step in steps:
        below = _below(name, own)
        signal = visit(step, signal, below) if isinstance(step, nn.Module) else _apply(module, step, signal, below)
    return signal


def _apply(module: nn.Module, rule: Callable[[Signal], Found], signal: Signal, name: str) -> Found:
    try:
        return rule(signal)
    except ValueError as error:
        raise not_covered(module, name, str(error)) from None


def not_covered(module: nn.Module, name: str, why: str) -> ValueError:
    where = f"layer {name!r}, a {type(module).__name__}," if name else f"the {type(module).__name__}"
    return ValueError(f"the bound does not cover the network: {where} {why}")


Step = nn.Module | Callable[[Signal], Signal]


def _steps(module: nn.Module) -> list[tuple[str, Step]] | None:
    """The steps of a module of known structure, in order; None for other modules."""
    if isinstance(module, nn.Sequential) and _same(module, nn.Sequential):
        # named_children would leave out repeated modules.
        return [(own, step) for own, step in module._modules.items() if step is not None]
    if isinstance(module, Network) and _same(module, Network, "forward", "features"):
        return [("body", module.body), ("classifier", module.classifier)]
    if isinstance(module, MarginNetwork) and _same(module, MarginNetwork, "forward", "features"):
        head = module.head
        return [("body", module.body), ("embedding", module.embedding), ("head", lambda at: head_logits(head, at))]
    if isinstance(module, Normalized) and _same(module, Normalized, "forward", "normalize"):
        return [("", lambda at: _normalize(module, at)), ("network", module.network)]
    return None


def _same(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether the module inherits these methods of the class unchanged."""
    return all(getattr(type(module), name) is getattr(kind, name) for name in methods or ("forward",))


def _normalize(module: Normalized, signal: Signal) -> Signal:
    std, mean = (part.double().flatten().expand_as(signal.linf) for part in (module.std, module.mean))
    return signal.scaled(1 / std, -mean / std)


def _follow(module: nn.Module, signal: Signal, name: str) -> Signal:
    """The bounds after a module, found by tracing its forward."""
    if not module._modules:
        raise not_covered(module, name, "has no rule in dcnet.robustness.certificates")
    graph = _apply(module, lambda _: _trace(module), signal, name)
    *nodes, last = graph.nodes
    known: dict[fx.Node, Signal] = {}
    for node in nodes:
        known[node] = signal if node.op == "placeholder" and not known else _result(module, node, known, name)
    if not isinstance(last.args[0], fx.Node):
        raise not_covered(module, name, "has a forward that does not return one tensor")
    # Checked last, since the error for a missing rule is clearer.
    _apply(module, lambda at: _check_in_place(module, graph, at.shape), signal, name)
    return known[last.args[0]]


def _result(module: nn.Module, node: fx.Node, known: dict[fx.Node, Signal], name: str) -> Signal:
    given = [known[argument] for argument in node.args if isinstance(argument, fx.Node) and argument in known]
    if node.op == "call_module" and len(given) == len(node.args) == 1 and not node.kwargs:
        path = str(node.target)
        return visit(module.get_submodule(path), given[0], _below(name, path))
    found = _called(node, given) if node.op in ("call_function", "call_method") else None
    if found is None:
        raise not_covered(module, name, f"calls {_name(node)} in its forward, for which there is no rule")
    return found


def _called(node: fx.Node, given: list[Signal]) -> Signal | None:
    """The bounds after a function or method, or None if there is no rule for it."""
    if node.target in ADDITIONS and len(given) == len(node.args) == 2 and not node.kwargs:
        return added(*given)
    if node.target in RELUS and len(given) == len(node.args) == 1:
        return relu(None, given[0])
    if node.target in FLATTENINGS and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs:
        return flatten(None, given[0])
    return given[0] if node.target in IDENTITIES and len(given) == 1 else None


def _below(name: str, own: str) -> str:
    return f"{name}.{own}" if name and own else name or own
