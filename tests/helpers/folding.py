"""Networks to fold, and the difference between a folded network and the original."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcnet.layers import Decoupled


def disturb(model: nn.Module) -> None:
    """Changes the parameters of normalizations and operators from their initial values, some to negative ones.

    Batch normalization keeps the statistics of the last batch only, so that the output of a deep network still depends
    on its input.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
        if isinstance(module, _BatchNorm) and module.affine:
            sign = torch.randint_like(module.weight, 2) * 2 - 1
            module.weight.data = sign * (0.5 + torch.rand_like(sign))
            nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, Decoupled):
            for name in module.operator.learned:
                with torch.no_grad():
                    module.get_parameter(name).mul_(1 + 0.3 * torch.rand_like(module.get_parameter(name)))


def trained(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model after a few batches, which set running means and statistics."""
    model.to(dtype)
    disturb(model)
    for _ in range(3):
        model(torch.randn(6, *shape, dtype=dtype) + 0.2)
    return model


@torch.no_grad()
def error(model: nn.Module, other: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference of outputs, relative to the largest output."""
    batch = torch.randn(5, *shape, dtype=dtype)
    expected = model.eval()(batch)
    assert expected.std(0).max() > 1e-3 * expected.abs().max(), "the outputs must depend on the input"
    return float((other(batch) - expected).abs().max() / expected.abs().max())


def norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
