"""Where a network stopped giving numbers."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class DivergenceError(ArithmeticError):
    """The loss was not finite; the message names the step and the layer."""


@torch.no_grad()
def first_bad_layer(model: nn.Module, images: Tensor) -> str:
    """The first layer whose weights, output for these images, or gradient, are not all finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name!r} has values that are not finite"
    found: list[str] = []
    # Of modules that have others below them, too: these come first, but what is between them is nobody else's.
    handles = [
        module.register_forward_hook(_watch(name or type(module).__name__, found))
        for name, module in model.named_modules()
    ]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"the output of the layer {found[0]!r} is the first that is not finite"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"the gradient of {name!r} is not, though all outputs are"
    return "all layers give finite outputs, so it is the loss itself"


def _watch(name: str, found: list[str]) -> object:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        tensors = (value for value in tree_leaves(output) if isinstance(value, Tensor))
        if not all(value.isfinite().all() for value in tensors):
            found.append(name)

    return hook
