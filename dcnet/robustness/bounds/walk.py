"""Through a network: its structure where that is known, and otherwise what its `forward` does."""

import functools
import operator
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from dcnet.models.blocks import Network
from dcnet.models.margin_network import MarginNetwork
from dcnet.models.normalized import Normalized
from dcnet.opaque import has_hooks
from dcnet.robustness.bounds import pooling  # noqa: F401 (it enters its rules)
from dcnet.robustness.bounds.head import head_logits
from dcnet.robustness.bounds.layers import added, flatten, relu, rule_of
from dcnet.robustness.bounds.signal import Signal
from dcnet.robustness.bounds.traced import check_values, traced, words

Found = TypeVar("Found")
# What a traced forward may call beside modules: functions and methods of these names.
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
FLATTENINGS = (torch.flatten, "flatten")
NOTHINGS = ("contiguous",)


def visit(module: nn.Module, signal: Signal, name: str = "") -> Signal:
    """What is known behind the module, in evaluation mode, or a ValueError that names the layer that is not covered."""
    module = getattr(module, "_orig_mod", module)
    if has_hooks(module):
        raise not_covered(module, name, "has hooks, which may change what it computes")
    if "forward" in vars(module):
        raise not_covered(module, name, "has a forward that is not that of its class")
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
    """What a module of known structure does, one after the other; None for others."""
    if isinstance(module, nn.Sequential) and _same(module, nn.Sequential):
        # Not its named_children, which leave out a module that has come before.
        return [(own, step) for own, step in module._modules.items() if step is not None]
    if isinstance(module, Network) and _same(module, Network, "forward", "features"):
        return [("body", module.body), ("classifier", module.classifier)]
    if isinstance(module, MarginNetwork) and _same(module, MarginNetwork, "forward", "features"):
        head = module.head
        return [("body", module.body), ("embedding", module.embedding), ("head", lambda at: head_logits(head, at))]
    if isinstance(module, Normalized) and _same(module, Normalized, "forward", "normalize"):
        return [("", lambda at: _normalised(module, at)), ("network", module.network)]
    return None


def _same(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether the module has these methods of the class, or those of a class of its own."""
    return all(getattr(type(module), name) is getattr(kind, name) for name in methods or ("forward",))


def _normalised(module: Normalized, signal: Signal) -> Signal:
    std, mean = (part.double().flatten().expand_as(signal.linf) for part in (module.std, module.mean))
    return signal.scaled(1 / std, -mean / std)


def _follow(module: nn.Module, signal: Signal, name: str) -> Signal:
    """What is known behind a module whose forward is traced."""
    if not module._modules:
        raise not_covered(module, name, "has no rule in dcnet.robustness.bounds")
    graph = _apply(module, lambda _: traced(module), signal, name)
    *nodes, last = graph.nodes
    known: dict[fx.Node, Signal] = {}
    for node in nodes:
        known[node] = signal if node.op == "placeholder" and not known else _result(module, node, known, name)
    if not isinstance(last.args[0], fx.Node):
        raise not_covered(module, name, "has a forward that gives something else than one tensor")
    # Only now, since what is not covered at all is said more clearly by then.
    _apply(module, lambda at: check_values(module, graph, at.shape), signal, name)
    return known[last.args[0]]


def _result(module: nn.Module, node: fx.Node, known: dict[fx.Node, Signal], name: str) -> Signal:
    given = [known[argument] for argument in node.args if isinstance(argument, fx.Node) and argument in known]
    if node.op == "call_module" and len(given) == len(node.args) == 1 and not node.kwargs:
        path = str(node.target)
        return visit(module.get_submodule(path), given[0], _below(name, path))
    found = _called(node, given) if node.op in ("call_function", "call_method") else None
    if found is None:
        raise not_covered(module, name, f"calls {words(node)} in its forward, for which there is no rule")
    return found


def _called(node: fx.Node, given: list[Signal]) -> Signal | None:
    """The result of a function or method, if it is one of the few that are known as they are called."""
    if node.target in ADDITIONS and len(given) == len(node.args) == 2 and not node.kwargs:
        return added(*given)
    if node.target in RELUS and len(given) == len(node.args) == 1:
        return relu(None, given[0])
    if node.target in FLATTENINGS and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs:
        return flatten(None, given[0])
    return given[0] if node.target in NOTHINGS and len(given) == 1 else None


def _below(name: str, own: str) -> str:
    return f"{name}.{own}" if name and own else name or own
