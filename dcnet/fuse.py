"""Fused blocks: runs chains of convolution, batch normalization, addition and activation as one block each on a GPU.

`fuse` changes no module, parameter or name. Each container with chains gets an attribute `forward`, which runs a traced
graph with fused chains on a GPU, and the `forward` of its class anywhere else.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from dcnet import kernels
from dcnet.chains import Layer, Match, Trace, is_layer, trace_all
from dcnet.convert.selection import TEXT_WIDTH
from dcnet.inlining import FUSED, NormAlone, has_activation, is_replaced
from dcnet.table import Column, Table
from dcnet.tracing import is_symbolic

Model = TypeVar("Model", bound=nn.Module)

# The attributes of a fused module: its plan, and the methods that `fuse` replaces.
PLAN, FORWARD, REPLICATE = "_fused_plan", "forward", "_replicate_for_data_parallel"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The attributes of every module.
USUAL = frozenset(vars(nn.Module()))


def fuse(model: Model) -> Model:
    """Runs chains of convolution, batch normalization, addition and activation as one block each on a GPU, in place.

    A chain is a DecoupledConv2d or a folded one, then optionally nn.BatchNorm2d or BatchNormAct2d of timm, the addition
    of a residual, and ReLU, PReLU, ReLU6, SiLU or Hardswish (after an addition only ReLU). Modules, parameters, buffers
    and their names stay the same. On other devices, under torch.export and torch.fx, and after a change of the network
    such as a new hook or a replaced layer, the `forward` of each class runs. Call `fuse` again after such a change.
    `fusion_report` says which layers are fused, and why others are not.
    """
    unfuse(model)
    for module, traced in reversed(trace_all(model).traces.items()):
        if traced.chains:
            kind: Any = type(module)
            forward = types.MethodType(_forward_of(kind), module)
            replicate = types.MethodType(_replicate_for_data_parallel, module)
            vars(module).update({PLAN: Plan(module, traced), FORWARD: forward, REPLICATE: replicate})
    return model


def unfuse(model: Model) -> Model:
    """Restores the `forward` of the class in all modules, in place."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r}")
    for module in model.modules():
        if PLAN in vars(module):
            # Another library may have wrapped our forward, which then runs that of the class.
            ours = (PLAN, REPLICATE) if is_replaced(module) else (PLAN, REPLICATE, FORWARD)
            for name in ours:
                vars(module).pop(name, None)
    return model


@dataclass(frozen=True)
class Row:
    """One layer: the steps of its block, or None with the reason in `note`."""

    layer: str
    fused: str | None
    note: str = ""


@dataclass(frozen=True)
class Fusion:
    """The fused blocks of a network, one row per DecoupledConv2d; `print` shows it as text, `rich.print` as a table.

    `state` says whether the blocks are in use: empty if so, otherwise what to do.
    """

    rows: tuple[Row, ...]
    state: str = ""

    @property
    def fused(self) -> dict[str, str]:
        """The layers with a fused block, and the steps of each block."""
        return {row.layer: row.fused for row in self.rows if row.fused is not None}

    @property
    def left(self) -> dict[str, str]:
        """The layers without a fused block, and the reason for each."""
        return {row.layer: row.note for row in self.rows if row.fused is None}

    def __rich__(self) -> Table:
        columns = [Column(heading, wraps=True) for heading in ("layer", "fused block", "note")]
        rows = [(row.layer or "(the model)", row.fused or "", row.note) for row in self.rows]
        title = f"layers in fused blocks: {len(self.fused)}, left: {len(self.left)}"
        left = [i for i, row in enumerate(self.rows) if row.fused is None]
        return Table(columns, rows, title, [self.state] if self.state else [], dim=left)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH).print(self)
        return text.getvalue().rstrip("\n")


def fusion_report(model: nn.Module) -> Fusion:
    """Says for every DecoupledConv2d which steps `fuse` runs as one block, or why it leaves the layer alone."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r}")
    found, names = trace_all(model), {module: name for name, module in model.named_modules()}
    rows = tuple(_row(*found.find(layer), layer, names) for layer in model.modules() if is_layer(layer))
    plans = [plan for module in model.modules() if (plan := vars(module).get(PLAN)) is not None]
    if not any(row.fused for row in rows):
        return Fusion(rows, "nothing to fuse")
    if not plans:
        return Fusion(rows, "not in use yet: call dcnet.fuse")
    return Fusion(rows, "" if all(plan.is_intact() for plan in plans) else "changed since dcnet.fuse: call it again")


def _row(chain: Match | None, reason: str, layer: Layer, names: dict[nn.Module, str]) -> Row:
    if chain is None:
        return Row(names[layer], None, reason)
    return Row(names[layer], chain.describe(names))


class Chain(nn.Module):
    """activation(norm(layer(x)) + residual) as one block if the kernels support it, otherwise module by module.

    Returns the output; for the next chain its sums of squares over channels, None if they were not computed; and the
    output for its second user, see `kernels.block`.
    """

    def __init__(self, chain: Match):
        super().__init__()
        self.layer: Any = chain.layer
        self.norm, self.activation = chain.norm, chain.activation
        self.in_place, self.hands_on = chain.in_place, bool(chain.takers)

    def forward(
        self, x: Tensor, squares: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        given = (x, squares, self.layer, self.norm, self.activation, residual)
        known = kernels.find_known_block(*given, self.hands_on)
        if known is not None or kernels.fits_block(*given):
            return kernels.block(*given, self.hands_on, known)
        output = self.layer(x)
        if self.norm is not None:
            # Without the activation that a norm of timm contains.
            output = nn.BatchNorm2d.forward(self.norm, output)
        if residual is not None:
            output = output.add_(residual) if self.in_place else output + residual
        output = output if self.activation is None else self.activation(output)
        return output, None, output


class Attribute(nn.Module):
    """Reads a tensor of a module at every call, since `to` and others may replace it."""

    def __init__(self, owner: nn.Module, name: str):
        super().__init__()
        # In a tuple, since the owner is no submodule: it may contain this module's graph.
        self.owner, self.name = (owner,), name

    def forward(self) -> Any:
        return getattr(self.owner[0], self.name)


class Plan:
    """The fused graph of a module, and everything that must stay the same for the graph to be valid.

    The graph shares the modules. It is not a submodule, so that the names of modules and parameters stay.
    """

    def __init__(self, root: nn.Module, traced: Trace):
        chained = [module for chain in traced.chains for module in chain.modules()]
        called = list(dict.fromkeys([*traced.inlined, *chained]))
        containers = [module for module in root.modules() if any(map(is_layer, module.modules()))]
        norms = [module for module in traced.inlined if has_activation(module)]
        self.hooks = tuple(getattr(module, name) for module in called for name in HOOKS)
        self.classes = tuple((module, type(module)) for module in (root, *called))
        self.forwards = tuple((module, vars(module).get(FORWARD)) for module in called)
        self.children = tuple((module, tuple(module._modules.values())) for module in {*containers, *traced.inlined})
        # The momentum of a norm may change: its chain reads it at every call.
        fixed = [root, *(module for module in traced.inlined if module not in norms)]
        self.attributes = tuple(each for module in fixed for each in _plain_attributes(module))
        self.layers = tuple((chain.layer, chain.layer.operator) for chain in traced.chains)
        self.graph = _fused_graph(root, traced)

    def is_intact(self) -> bool:
        """Whether the modules are as they were traced: the same objects and classes, without new hooks."""
        if any(self.hooks) or _has_any_global_hook():
            return False
        for module, kind in self.classes:
            if type(module) is not kind:
                return False
        for module, forward in self.forwards:
            if module.__dict__.get(FORWARD) != forward:
                return False
        for module, children in self.children:
            if tuple(module._modules.values()) != children:
                return False
        for module, name, value in self.attributes:
            if module.__dict__.get(name) != value:
                return False
        return all(_has_operator(layer, expected) for layer, expected in self.layers)

    # A compiler must not trace the check; see `modern` in kernels/dispatch.py.
    is_intact._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        copied = memo[id(self)] = Plan.__new__(Plan)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled model is not fused when it is loaded.
        return type(None), ()


@functools.lru_cache(maxsize=1024)
def _forward_of(kind: Any) -> Callable[..., Any]:
    """The forward of fused modules of a class; pickle reads its name, and loads the forward of the class instead."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan = getattr(self, PLAN, None)
        if plan is not None and _may_use_blocks((*args, *kwargs.values())) and plan.is_intact():
            return plan.graph.forward(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    forward.__name__ = FORWARD
    # accelerate would unwrap it, down to the forward of the class.
    del forward.__wrapped__
    vars(forward).update({"__signature__": inspect.signature(kind.forward), FUSED: forward})
    return forward


def _may_use_blocks(arguments: Sequence[Any]) -> bool:
    """Whether the first tensor is a batch of images that fused blocks can compute with."""
    for value in arguments:
        if is_symbolic(value):
            return False
        if isinstance(value, Tensor):
            return value.dim() == 4 and kernels.uses_blocks(value)
    return False


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """A replica for nn.DataParallel, without our methods, which are bound to this module."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name in (PLAN, FORWARD, REPLICATE):
        vars(replica).pop(name, None)
    return replica


def _has_operator(layer: Layer, expected: Any) -> bool:
    # `dcnet.robustness` replaces `decoupled` for smoothed gradients.
    return layer.operator is expected and "decoupled" not in vars(layer) and "blend" not in layer._buffers


def _plain_attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The numbers, flags and texts of a module, which its forward may depend on."""
    for name, value in vars(module).items():
        if name not in USUAL and isinstance(value, int | float | str | None):
            yield module, name, value


def _fused_graph(root: nn.Module, traced: Trace) -> fx.GraphModule:
    """The graph with each chain as one call; it shares all other modules with the root."""
    graph, modules = traced.graph, dict[str, nn.Module]()
    squares = dict[Match, fx.Node]()
    for place, chain in enumerate(traced.chains):
        name = f"dcnet_chain_{place}"
        modules[name] = Chain(chain)
        _insert(graph, name, chain, squares)
    for place, node in enumerate(graph.find_nodes(op="get_attr")):
        owner, _, attribute = str(node.target).rpartition(".")
        node.op, node.target = "call_module", f"dcnet_attribute_{place}"
        modules[node.target] = Attribute(root.get_submodule(owner), attribute)
    for node in graph.find_nodes(op="call_module"):
        if node.target not in modules:
            called = root.get_submodule(str(node.target))
            modules[str(node.target)] = NormAlone(called) if has_activation(called) else called
    return fx.GraphModule(modules, graph)


def _insert(graph: fx.Graph, name: str, chain: Match, squares: dict[Match, fx.Node]) -> None:
    """Replaces the nodes of a chain by one call, at the place of the last one, where all inputs are known."""
    first, last = chain.nodes[0], chain.nodes[-1]
    given = None if chain.source is None else squares[chain.source]
    with graph.inserting_before(last):
        call = graph.call_module(name, (first.args[0], given, chain.residual))
        output = graph.call_function(operator.getitem, (call, 0))
        if chain.takers:
            squares[chain] = graph.call_function(operator.getitem, (call, 1))
        again = graph.call_function(operator.getitem, (call, 2))
    # Autograd would not see that a change of one result in place also changes the other.
    for user in [] if chain.may_change else list(last.users)[1:]:
        user.replace_input_with(last, again)
    last.replace_all_uses_with(output)
    for node in [*reversed(chain.nodes), *(node for node in (again, output) if not node.users)]:
        graph.erase_node(node)
