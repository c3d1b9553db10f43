"""Modes of a network and of PyTorch: evaluation, frozen, kept buffers, batch statistics, precision, search of plans."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; on exit every module returns to its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Call train() first, since some layers override it: those of LoRA merge their weights for evaluation.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Sets requires_grad of all parameters to False; on exit each has its previous value.

    An attack needs the gradient of the images only; the gradients of the parameters would cost as much.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


@contextmanager
def frozen_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with frozen parameters; on exit the model is as before."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be an nn.Module, not {type(model).__name__}")
    with evaluating(model), frozen(model):
        yield


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restores all buffers on exit, such as running statistics that a forward pass in training mode changes."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def full_precision() -> Iterator[None]:
    """Full float32 precision on a GPU, where convolutions and products otherwise keep about three digits (TF32).

    A threshold from one machine is used on another, so it must not depend on the precision.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn = torch.backends.cudnn
    try:
        with cudnn.flags(cudnn.enabled, deterministic=cudnn.deterministic, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


# Buffers with running statistics, of batch normalization and of relative radii.
RUNNING = ("running_mean", "running_var", "mean_norm")


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Evaluation with the statistics of each batch instead of running ones, which stay unchanged."""
    held = [(module, name, module._buffers.get(name)) for module in model.modules() for name in RUNNING]
    held = [(module, name, buffer) for module, name, buffer in held if buffer is not None]
    try:
        for module, name, _ in held:
            module._buffers[name] = None
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def search_convolutions(all_plans: bool) -> None:
    """Lets cuDNN time several plans for each new convolution and use the fastest.

    Args:
        all_plans: time all plans that cuDNN proposes, not only the first ten. The search then takes up to several
            seconds for a convolution of a new shape, and finds plans that are up to a fifth faster.
    """
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0 if all_plans else 10
