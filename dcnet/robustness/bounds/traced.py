"""What the `forward` of a module does, one call after the other, where that can be known."""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcnet.folding import OneLevel


class _InPlace(fx.Proxy):
    """What stands for a value, and knows that `+=` changes it; torch's own would take it for an addition."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Watchful(OneLevel):
    """Traces one level, changes in place as such."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlace(node, self)


def traced(module: nn.Module) -> fx.Graph:
    """The graph of its forward in the mode that it is in, or a ValueError of one clause."""
    try:
        return _Watchful().trace(module)
    # A forward may do anything with what stands for its input, and fail in any way.
    except Exception as error:
        raise ValueError(f"has a forward that cannot be traced: {error}") from None


class _Watching(fx.Interpreter):
    """Computes a graph, and remembers the first value that was used after something had changed it in place.

    Torch counts the changes of a tensor, those by another name of it and those that a module makes included.
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
        # Not what it was compiled to, since that would be compiled once more for this one image.
        module = self.fetch_attr(target)
        return getattr(module, "_orig_mod", module)(*args, **kwargs)


def check_values(module: nn.Module, graph: fx.Graph, shape: Sequence[int]) -> None:
    """Refuses a graph in which one name stands for two values, before and after a change in place: a graph has one.

    Args:
        module: in evaluation mode.
        graph: of its forward, in which all values are tensors.
        shape: of its input, without the batch.
    """
    watching = _Watching(module, graph)
    try:
        watching.run(torch.zeros(1, *shape, **_kind(module)))
    # The same as above, with what its input stands for.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"has a forward that fails for {list(shape)} of an image: {reason}") from None
    if watching.stale is not None:
        raise ValueError(
            f"changes {words(watching.stale)} in place in its forward, and uses it afterwards: make a new value, as in "
            "y = y + x"
        )


def _kind(module: nn.Module) -> dict[str, Any]:
    """The type and the place of the tensors that the module computes with."""
    tensors: chain[Tensor] = chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    return {"dtype": like.dtype, "device": like.device}


def words(node: fx.Node) -> str:
    """What a node calls, or is called itself."""
    return repr(getattr(node.target, "__name__", str(node.target)))
