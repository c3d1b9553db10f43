"""A network that is attacked and does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dcnet.verification.embeddings import evaluating


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients of parameters, after which modes and parameters are as they were.

    An attack asks for gradients of images alone: those of the weights would cost a third of the time.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be an nn.Module, not {type(model).__name__}")
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with evaluating(model):
        try:
            for parameter, _ in wanted:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, before in wanted:
                parameter.requires_grad_(before)
