"""Folds a network for inference: prepared filters, and batch normalization folded into the layer before it."""

import contextlib
import copy
import functools
import inspect
import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils._pytree import tree_leaves

from dcnet.convert.selection import TWINS, is_unmodified
from dcnet.fuse import fuse, unfuse
from dcnet.inference.folded_layers import Layer, PlainLayer, fold_layer
from dcnet.inlining import has_activation
from dcnet.layers import Decoupled
from dcnet.tracing import has_hooks

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Modules with submodules, each with the graphs of its forward: one, or one for each way to call it.
Traced = list[tuple[nn.Module, list[fx.Graph]]]
Pair = tuple[Layer | PlainLayer, _BatchNorm]


def fold(model: nn.Module) -> nn.Module:
    """A copy of the model for inference: the same outputs in evaluation mode, with less work.

    Filters are normalized, constants fixed and running means multiplied into the radii beforehand. Batch normalization
    is folded into the layer before it, decoupled or plain, and dropout is removed. A removed module becomes an
    nn.Identity, so all modules keep their names. The copy cannot be trained: only the input has gradients.

    torch.fx traces the `forward` of every module, with its submodules as leaves, to find the layer before each
    normalization. If a `forward` cannot be traced, the normalizations that it calls directly stay; those in an
    nn.Sequential are folded, so it must not use values between a layer and its normalization there. A normalization
    after a fully connected layer is assumed to normalize the features of rows [N, features].

    A layer keeps its normalization if it is called more than once, if its output is used elsewhere, or if it has hooks.
    These stay unchanged: a layer that still blends with the plain one, a layer whose filters are read by other modules,
    a subclass that computes something else, everything below a module whose `forward` depends on the class of its
    submodules, and modules that stay in training mode when `eval` is called. If there is a GPU, `dcnet.fuse` runs the
    layers of the copy with the additions and activations after them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r}")
    check_mean_norms(model)
    copied = unfuse(copy.deepcopy(model)).eval().requires_grad_(False)
    graphs = _trace_all(_parents(copied))
    pairs = list(_pairs(copied, graphs))
    replacements = _replacements(copied, graphs, pairs)
    before = {module: (type(module), vars(module)) for module in replacements}
    _change({module: (type(new), vars(new)) for module, new in replacements.items()})
    # A forward that tests classes may act differently with folded layers: restore the layers below it.
    kept = {module for parent in _changed_by_folding(graphs, before) for module in parent.modules()}
    kept.update(module for pair in pairs if not kept.isdisjoint(pair) for module in pair)
    _change({module: was for module, was in before.items() if module in kept})
    copied.eval()
    return fuse(copied) if torch.cuda.is_available() else copied


def check_mean_norms(model: nn.Module) -> None:
    """Raises ValueError if a radius is relative to a mean norm that no batch has set yet."""
    for name, module in model.named_modules():
        if not isinstance(module, Decoupled) or module.operator.decay is None:
            continue
        mean = module.get_buffer("mean_norm").item()
        if not 0 < mean < math.inf:
            raise ValueError(
                f"layer {name!r} with operator {str(module.operator)!r} has seen no data: its mean norm is {mean:g}; "
                "run a batch in training mode first, or recouple the layer if the model never calls it"
            )


class OneLevel(fx.Tracer):
    """Traces the forward of one module with all submodules as leaves."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph; nodes whose value the forward stores in the module have `stored` in their meta."""
        before = vars(root)
        # The forward may store proxies in the module, also in lists and dicts: trace with a copy of its state.
        root.__dict__ = {
            name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in before.items()
        }
        try:
            graph = super().trace(root, concrete_args)
            for value in tree_leaves(vars(root)):
                if isinstance(value, fx.Proxy):
                    value.node.meta["stored"] = True
            return graph
        finally:
            # Constants of the graph stay in the module.
            before.update({name: value for name, value in vars(root).items() if name.startswith("_tensor_constant")})
            root.__dict__ = before

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A slice such as `self.blocks[:2]` is a new nn.Sequential, not a submodule: trace into it.
        found = m in (self.submodule_paths or {})
        return super().call_module(m, forward, args, kwargs) if found else forward(*args, **kwargs)


def _trace_all(parents: Iterable[nn.Module]) -> Traced:
    """The modules whose forward can be traced, with its graphs."""
    graphs: Traced = []
    for parent in parents:
        # With proxies, a forward may raise any error.
        with contextlib.suppress(Exception):
            graphs.append((parent, [OneLevel().trace(parent, given) for given in _ways_to_call(parent)]))
    return graphs


def _ways_to_call(module: nn.Module) -> list[dict[str, Any]]:
    """Arguments to trace with: all as proxies, and optional ones as their defaults if there are any."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    return [{}, defaults] if defaults else [{}]


def _parents(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._modules and not has_activation(module)]


def _found(parent: nn.Module, graph: fx.Graph, *kinds: str) -> Iterator[nn.Module]:
    """The modules that the graph calls ("call_module") or reads a tensor of ("get_attr"), once per node."""
    for node in graph.nodes:
        if node.op in kinds:
            path = str(node.target)
            yield parent.get_submodule(path if node.op == "call_module" else path.rpartition(".")[0])


def _pairs(model: nn.Module, graphs: Traced) -> Iterator[Pair]:
    """Every layer with the batch normalization that is the only user of its output, in all graphs."""
    uses = sum((_uses(parent, ways) for parent, ways in graphs), Counter[nn.Module]())
    places = Counter(child for parent in _parents(model) for child in parent.children())
    alone = {module for module, count in places.items() if count == 1 and uses[module] == 1 and not _is_fixed(module)}
    for parent, ways in graphs:
        found = [[pair for node in graph.nodes if (pair := _pair(parent, node)) is not None] for graph in ways]
        yield from (pair for pair in found[0] if alone.issuperset(pair) and all(pair in others for others in found))


def _uses(parent: nn.Module, ways: list[fx.Graph]) -> Counter[nn.Module]:
    """How often each module is used, in the graph that uses it most."""
    counts = [Counter(_found(parent, graph, "call_module", "get_attr")) for graph in ways]
    return functools.reduce(operator.or_, counts)


def _pair(parent: nn.Module, node: fx.Node) -> Pair | None:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    source, norm = node.args[0], parent.get_submodule(str(node.target))
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return None
    if len(source.users) != 1 or "stored" in source.meta:
        return None
    layer = parent.get_submodule(str(source.target))
    if not (type(norm) in NORMS or has_activation(norm)) or not (_is_decoupled(layer) or _is_plain(layer)):
        return None
    assert isinstance(norm, _BatchNorm)
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    return (layer, norm) if has_statistics and norm.num_features == len(layer.weight) else None


def _replacements(model: nn.Module, graphs: Traced, pairs: list[Pair]) -> dict[nn.Module, nn.Module]:
    """The module that replaces each folded one."""
    found: dict[nn.Module, nn.Module] = {}
    for layer, norm in pairs:
        found.update({layer: _fuse(layer, norm), norm: _removed(norm)})
    fixed = {module for parent, ways in graphs for graph in ways for module in _found(parent, graph, "get_attr")}
    for module in model.modules():
        if module not in found and module not in fixed and not _is_fixed(module):
            if _is_decoupled(module):
                found[module] = fold_layer(module)
            elif type(module) in DROPOUTS:
                found[module] = _removed(module)
    return found


def _fuse(layer: Layer | PlainLayer, norm: _BatchNorm) -> nn.Module:
    if _is_decoupled(layer):
        return fold_layer(layer, norm)
    fused: nn.Module = (
        fuse_linear_bn_eval(layer, norm) if isinstance(layer, nn.Linear) else fuse_conv_bn_eval(layer, norm)
    )
    return fused.requires_grad_(False)


def _removed(module: nn.Module) -> nn.Module:
    """An nn.Identity, or the activation inside of a norm, with the public attributes of the module, such as `p`."""
    rest = nn.Sequential(OrderedDict(module.named_children())) if has_activation(module) else nn.Identity()
    vars(rest).update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    return rest


def _is_plain(module: nn.Module) -> TypeGuard[PlainLayer]:
    return type(module) in TWINS


def _is_decoupled(module: nn.Module) -> TypeGuard[Layer]:
    """Whether the module computes what its dcnet class does: no overridden method, no blend with the plain layer."""
    return isinstance(module, Decoupled) and is_unmodified(module) and float(getattr(module, "blend", 1.0)) == 1


def _is_fixed(module: nn.Module) -> bool:
    """Whether the module has hooks, or stays in training mode after `eval`."""
    return bool(module.training or has_hooks(module) or module._backward_hooks)


def _changed_by_folding(graphs: Traced, replaced: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose forward has different steps after folding than before."""
    for parent, ways in graphs:
        again = _trace_all([parent]) if parent not in replaced else [(parent, ways)]
        if [_steps(graph) for _, found in again for graph in found] != [_steps(graph) for graph in ways]:
            yield parent


def _steps(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(node.op, node.target) for node in graph.nodes if node.op != "get_attr"]


def _change(states: dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]]) -> None:
    """Gives modules another class and state in place, since a network may keep references to them."""
    for module, (kind, state) in states.items():
        module.__class__ = kind
        module.__dict__ = state
