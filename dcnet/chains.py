"""Chains of convolution, batch normalization, addition and activation in networks, found by tracing with torch.fx."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from dcnet.convert.selection import is_unmodified
from dcnet.inlining import IN_PLACE, cause, has_activation, is_changed, is_hooked, is_replaced, trace, varies
from dcnet.kernels.activations import CODES, follows_residual
from dcnet.kernels.dispatch import filters_alone
from dcnet.kernels.plan import has_device_functions
from dcnet.layers import DecoupledConv2d

if TYPE_CHECKING:
    from dcnet.inference.folded_layers import FoldedConv

Layer: TypeAlias = "DecoupledConv2d | FoldedConv"

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
IN_PLACE_ADDITIONS = (operator.iadd, "add_")
# Modules of these packages change their input in place only if they have a true attribute `inplace`.
NOT_IN_PLACE = ("torch.nn.", "dcnet.", "timm.", "torchvision.ops.")
# Functions and methods of activations, and the classes of modules that compute the same.
FUNCTIONS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), nn.ReLU),
    **{F.relu6: nn.ReLU6, F.silu: nn.SiLU, F.hardswish: nn.Hardswish},
}


@dataclass(eq=False)
class Match:
    """A chain in a graph: activation(norm(layer(x)) + residual), each part but the layer optional.

    Attributes:
        nodes: the calls of the layer, the norm, the addition and the activation.
        addition: the node that adds the residual.
        in_place: whether the addition changes the output of the norm in place.
        source: the chain whose output is x, which passes on its sums of squares.
        takers: the chains that take the sums of squares of the output.
        may_change: whether something may change the output in place.
    """

    layer: Layer
    nodes: list[fx.Node]
    norm: nn.BatchNorm2d | None = None
    addition: fx.Node | None = None
    in_place: bool = False
    activation: nn.Module | None = None
    source: Match | None = None
    takers: list[Match] = field(default_factory=list)
    may_change: bool = False

    @property
    def is_useful(self) -> bool:
        return len(self.nodes) > 1 or self.source is not None or bool(self.takers)

    @property
    def residual(self) -> fx.Node | None:
        """The node that is added to the output of the layer or the norm."""
        if self.addition is None:
            return None
        before = self.nodes[self.nodes.index(self.addition) - 1]
        return next(node for node in self.addition.all_input_nodes if node is not before)

    def modules(self) -> list[nn.Module]:
        return [module for module in (self.layer, self.norm, self.activation) if module is not None]

    def describe(self, names: Mapping[nn.Module, str]) -> str:
        """The steps of the chain as text, such as "conv + batch norm + ReLU, squares to layer2.conv"."""
        steps = ["conv"] + ["batch norm"] * (self.norm is not None) + ["residual"] * (self.addition is not None)
        steps += [] if self.activation is None else [type(self.activation).__name__]
        takers = ", ".join(names[taker.layer] for taker in self.takers)
        return " + ".join(steps) + (f", squares to {takers}" if takers else "")


@dataclass(eq=False)
class Trace:
    """The graph of a forward, the modules whose forward is inlined, the chains, and why other layers are in none."""

    graph: fx.Graph
    inlined: list[nn.Module]
    chains: list[Match]
    reasons: dict[nn.Module, str]


@dataclass(eq=False)
class Traces:
    """The traced containers of a network, from the outermost to the innermost, and why others cannot be traced."""

    traces: dict[nn.Module, Trace]
    failures: dict[nn.Module, str]

    def find(self, layer: Layer) -> tuple[Match | None, str]:
        """The chain of a layer in the outermost container that has chains and calls it, or why there is none."""
        reasons = [obstacle(layer)]
        for traced in self.traces.values():
            if found := next((chain for chain in traced.chains if chain.layer is layer), None):
                return found, ""
            reasons.append(traced.reasons.get(layer, ""))
            if reasons[-1] and traced.chains:
                break
        reasons += [why for module, why in self.failures.items() if layer in set(module.modules())]
        return None, next(filter(None, reasons), "no traced forward calls it")


def trace_all(model: nn.Module) -> Traces:
    """Traces every container of layers that can be fused; those that cannot be traced are called, not traced into."""
    usable = {module for module in model.modules() if is_layer(module) and not obstacle(module)}
    parents = [module for module in model.modules() if module._modules]
    containers = [module for module in parents if not usable.isdisjoint(module.modules())]
    inlined = {*containers, *(module for module in model.modules() if type(module) in (nn.Identity, nn.Sequential))}
    leaves = {module for module in model.modules() if module not in inlined or is_changed(module)}
    traces, failures = dict[nn.Module, Trace](), dict[nn.Module, str]()
    # From the innermost to the outermost, so that failures are leaves of the containers around them.
    for module in reversed(containers):
        if reason := varies(module):
            failures[module] = f"the forward of {type(module).__name__} {reason}"
            continue
        # With proxies, a forward may raise any error.
        try:
            graph, inside = trace(module, leaves)
            traces[module] = Trace(graph, inside, *Finder(module, graph).find())
        except Exception as error:
            failures[module] = f"the forward of {type(module).__name__} {cause(error)}"
            leaves.add(module)
    return Traces(dict(reversed(traces.items())), failures)


def is_folded(module: nn.Module | None) -> TypeGuard[FoldedConv]:
    """Whether the module is a folded convolution; its class is not imported, since training does not need it."""
    return getattr(module, "is_folded", False)


def is_layer(module: nn.Module | None) -> TypeGuard[Layer]:
    """Whether the module is a decoupled two-dimensional convolution, folded or not."""
    return isinstance(module, DecoupledConv2d) or (is_folded(module) and module.weight.dim() == 4)


def takes_squares(match: Match) -> bool:
    """Whether the layer needs the sums of squares of its input."""
    return not match.layer.operator.norm_cancels


def obstacle(layer: Layer) -> str:
    """Why a layer cannot be in a chain, or ""."""
    own = "is_folded" in vars(type(layer)) or (isinstance(layer, DecoupledConv2d) and is_unmodified(layer))
    op = layer.operator
    is_simple = filters_alone(op)
    reasons = {
        f"{type(layer).__name__} overrides methods of DecoupledConv2d": not own,
        "its forward was replaced": is_replaced(layer) or "decoupled" in vars(layer),
        "it is parametrized: its weight is computed, not stored": is_parametrized(layer),
        "it has hooks": is_hooked(layer),
        "it blends with the plain layer": "blend" in layer._buffers,
        f"groups is {layer.groups}, not 1": layer.groups != 1,
        f"padding_mode is {layer.padding_mode!r}, not 'zeros'": layer.padding_mode != "zeros",
        f"the patch norm cancels in operator {str(op)!r}": op.norm_cancels and (is_folded(layer) or not is_simple),
        f"operator {str(op)!r} has no device functions": not has_device_functions(op),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


class Finder:
    """Finds the chains of a graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph):
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.places = {node: place for place, node in enumerate(self.nodes)}
        calls = [node for node in self.nodes if node.op == "call_module"]
        self.called = {node: root.get_submodule(str(node.target)) for node in calls}
        self.counts = Counter(self.called.values())
        self.taken = set[fx.Node]()

    def find(self) -> tuple[list[Match], dict[nn.Module, str]]:
        """The chains in the order of their last nodes, and why layers have none."""
        matches, reasons = list[Match](), dict[nn.Module, str]()
        # A sum of two chains belongs to the later one.
        for node in reversed(self.nodes):
            layer = self.called.get(node)
            if not is_layer(layer):
                continue
            if reason := obstacle(layer) or self._misuse(node):
                reasons[layer] = reason
            else:
                matches.append(self._grow(Match(layer, [node])))
        self._hand_on_squares(matches)
        reasons |= {match.layer: self._end(match) for match in matches if not match.is_useful}
        useful = [match for match in matches if match.is_useful]
        return sorted(useful, key=lambda match: self.places[match.nodes[-1]]), reasons

    def _misuse(self, node: fx.Node) -> str:
        count = self.counts[self.called[node]]
        if count > 1:
            return f"it is called {count} times"
        return "" if _is_simple(node) else "it is called with other arguments than one tensor"

    def _grow(self, match: Match) -> Match:
        user = self._next(match)
        if user is not None and self._is_norm(match, user):
            norm = self.called[user]
            assert isinstance(norm, nn.BatchNorm2d)
            match.norm = norm
            match.nodes.append(user)
        user = self._next(match)
        if user is not None and self._is_addition(match, user):
            match.addition, match.in_place = user, user.target in IN_PLACE_ADDITIONS
            match.nodes.append(user)
        user = self._next(match)
        if user is not None and (activation := self._activation(match, user)) is not None:
            match.activation = activation
            match.nodes.append(user)
        self.taken.update(match.nodes)
        return match

    def _next(self, match: Match) -> fx.Node | None:
        """The only user of the chain so far, unless the chain would move across a change in place."""
        users = list(match.nodes[-1].users)
        if len(users) != 1 or users[0] in self.taken:
            return None
        return None if self._has_writer(match.nodes[0], users[0], match.nodes) else users[0]

    def _has_writer(self, first: fx.Node, last: fx.Node, known: Sequence[fx.Node] = ()) -> bool:
        """Whether a node between these two changes a tensor in place; chains change only their own."""
        between = self.nodes[self.places[first] + 1 : self.places[last]]
        return any(self._writes(node) for node in between if node not in known and node not in self.taken)

    def _writes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            called = self.called[node]
            return not has_activation(called) and any(map(_may_write, called.modules()))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        # Operations of torch.ops have names such as "mul_.Tensor".
        name = name.partition(".")[0]
        named = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
        return named or node.target in IN_PLACE or bool(node.kwargs.get("inplace")) or "out" in node.kwargs

    def _is_norm(self, match: Match, user: fx.Node) -> bool:
        norm = self.called.get(user)
        if norm is None or is_changed(norm) or not _is_simple(user):
            return False
        if type(norm) is not nn.BatchNorm2d and not has_activation(norm):
            return False
        return self.counts[norm] == 1 and norm.num_features == match.layer.out_channels

    def _is_addition(self, match: Match, user: fx.Node) -> bool:
        if user.op == "call_module" or user.target not in ADDITIONS or user.kwargs or len(user.args) != 2:
            return False
        inputs, tail = user.all_input_nodes, match.nodes[-1]
        if len(inputs) != 2 or any(node.op == "get_attr" for node in inputs):
            return False
        return user.target not in IN_PLACE_ADDITIONS or user.args[0] is tail

    def _activation(self, match: Match, user: fx.Node) -> nn.Module | None:
        module = self.called.get(user)
        if module is None:
            module = self._as_module(user)
        elif type(module) not in CODES or is_changed(module) or not _is_simple(user):
            return None
        if match.addition is not None and not follows_residual(module):
            return None
        fits = not isinstance(module, nn.PReLU) or module.num_parameters in (1, match.layer.out_channels)
        return module if fits else None

    def _as_module(self, call: fx.Node) -> nn.Module | None:
        """A module that computes the same as the call of a function or method; None if it is no activation."""
        kind: Any = FUNCTIONS.get(call.target)
        simple = len(call.args) == 1 and call.kwargs.keys() <= {"inplace"}
        return kind(inplace=self._writes(call)) if kind is not None and simple else None

    def _hand_on_squares(self, matches: Sequence[Match]) -> None:
        starts = {match.nodes[0]: match for match in matches}
        for match in matches:
            tail = match.nodes[-1]
            match.may_change = self._has_writer(tail, self.nodes[-1])
            for user in tail.users:
                if user in starts and takes_squares(starts[user]) and not self._has_writer(tail, user):
                    starts[user].source = match
                    match.takers.append(starts[user])

    def _end(self, match: Match) -> str:
        """What follows a layer that is in no chain."""
        users = list(match.nodes[-1].users)
        if len(users) != 1:
            return f"its output is used {len(users)} times"
        (user,) = users
        module = self.called.get(user)
        if module is not None:
            return f"{type(module).__name__} follows it{_why(module)}"
        if user.op == "output":
            return "the forward returns its output"
        return f"{getattr(user.target, '__name__', user.target)} follows it"


def _is_simple(node: fx.Node) -> bool:
    """Whether a call has one argument, a value of the graph."""
    return len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _may_write(module: nn.Module) -> bool:
    """Whether a call may change its input in place."""
    known = type(module).__module__.startswith(NOT_IN_PLACE) and not is_changed(module)
    return not known or bool(getattr(module, "inplace", False))


def _why(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return ", which averages over processes"
    return ", which has hooks" if is_hooked(module) else ""
