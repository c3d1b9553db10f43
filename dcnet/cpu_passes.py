"""Eager mode on a CPU: passes over an output in parts that fit in the cache, and a fast tanh."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The numbers of a part: 1 MiB in float32.
PART = 2**18


def is_on_cpu(x: Tensor) -> bool:
    """Whether operations on this tensor run one by one on a CPU, or are recorded as torch's own operations."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether this is a plain tensor on a CPU, in eager mode: no compiler, no export, no transform, no mode."""
    # As in `is_on_cpu`; a call of it would make the call stack of a layer deeper.
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0
    return is_plain and torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


def may_overwrite(x: Tensor) -> bool:
    """Whether an operation may write to this intermediate result: eager mode on a CPU, without gradients."""
    return not torch.is_grad_enabled() and is_eager_on_cpu(x)


class FastTanh(torch.autograd.Function):
    """tanh(x) for x >= 0, from e = expm1(-2x) as -e / (e + 2): twice as fast as torch's, and as precise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = (-2 * x).expm1_()
        y = e.div_(torch.rsub(e, -2))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.tanh_backward(grad, *ctx.saved_tensors)
        return found


def in_parts(run: Callable[[Tensor, Tensor], Tensor], product: Tensor, n: Tensor, batch_dims: int) -> Tensor:
    """run(product, n) for a function of each patch alone, in parts and in place of the product where possible.

    The first `batch_dims` dimensions of product and norms are those of the patches. Memory for new results is the most
    expensive part of a pass, and the parts of all passes are in the cache.
    """
    # Sizes may be symbols outside of eager mode.
    if batch_dims < 1 or not may_overwrite(product) or product.numel() < 2 * PART:
        return run(product, n)
    if product.shape[:batch_dims] != n.shape[:batch_dims]:
        return run(product, n)
    rows, norms = product.flatten(0, batch_dims - 1), n.flatten(0, batch_dims - 1)
    size = max(1, PART // math.prod(rows.shape[1:]))
    for part, norm in zip(rows.split(size), norms.split(size), strict=True):
        part.copy_(run(part, norm))
    # The rows are a copy if the product is not contiguous.
    return rows.view(product.shape)
