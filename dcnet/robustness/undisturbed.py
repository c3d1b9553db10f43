"""A network that is attacked and does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dcnet.verification.embeddings import evaluating


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients of parameters, after which modes and parameters are as they were."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be an nn.Module, not {type(model).__name__}")
    with evaluating(model), frozen(model):
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, parameters want no gradient: an attack asks for that of images alone, and the others cost as much."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, before in wanted:
            parameter.requires_grad_(before)
