"""A stand-in for the kernels of fused blocks, networks with chains, and the comparison with unfused networks."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dcnet import kernels
from dcnet.fuse import unfuse
from dcnet.layers import DecoupledConv2d

SHAPE = (2, 4, 6, 6)


class Call(NamedTuple):
    """A block: its steps, as in the report, and whether sums of squares came with x or are handed on."""

    steps: str
    squares: bool
    hands_on: bool


class Blocks:
    """Stands in for the kernels: computes blocks with torch, and records them."""

    def __init__(self, fits: bool = True):
        self.fits, self.calls = fits, list[Call]()

    def fits_block(self, *args: Any) -> bool:
        return self.fits

    def block(
        self, x: Tensor, squares: Any, layer: Any, norm: Any, activation: Any, residual: Any, hands_on: bool, *_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        steps = ["conv"] + ["batch norm"] * (norm is not None) + ["residual"] * (residual is not None)
        steps += [] if activation is None else [type(activation).__name__]
        self.calls.append(Call(" + ".join(steps), squares is not None, hands_on))
        if squares is not None:
            torch.testing.assert_close(squares, sums_of_squares(x))
        output = layer.unhooked(x)
        # A norm of timm also contains an activation.
        output = output if norm is None else nn.BatchNorm2d.forward(norm, output)
        output = output if residual is None else output + residual
        output = output if activation is None else activation(output)
        return output, sums_of_squares(output) if hands_on else None, output


def sums_of_squares(x: Tensor) -> Tensor:
    return x.detach().float().square().sum(1)


def install(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """Makes fused models use blocks on the CPU."""
    made = Blocks()
    monkeypatch.setattr(kernels, "uses_blocks", lambda x: True, raising=False)
    monkeypatch.setattr(kernels, "fits_block", made.fits_block, raising=False)
    monkeypatch.setattr(kernels, "block", made.block, raising=False)
    return made


def conv(operator: str = "tanh-cos", **kwargs: Any) -> DecoupledConv2d:
    return DecoupledConv2d(4, 4, 3, padding=1, operator=operator, **kwargs)


class Net(nn.Module):
    """Two convolutions with batch normalization and all activations, and a forward that is given."""

    def __init__(self, run: Callable[[Any, Tensor], Any]):
        super().__init__()
        self.run = run
        self.conv, self.norm, self.conv2, self.norm2 = (
            conv(),
            nn.BatchNorm2d(4),
            conv("sphere-sqcos"),
            nn.BatchNorm2d(4),
        )
        self.relu, self.prelu, self.in_place = nn.ReLU(), nn.PReLU(4), nn.ReLU(inplace=True)
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("factor", torch.randn(4, 1, 1))
        self.kept = self.list = None

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def results(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """Output, gradients and buffers of a copy of the model after a training step, and its output in evaluation."""
    model = copy.deepcopy(model).double()
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    output = model.train()(x)
    output.sin().sum().backward()
    gradients = [parameter.grad for parameter in (x, *model.parameters()) if parameter.grad is not None]
    return [output, *gradients, *model.buffers(), model.eval()(x)]


def assert_same(model: nn.Module, blocks: Blocks, shape: tuple[int, ...] = SHAPE) -> None:
    """The model gives the results of its classes, with blocks and module by module."""
    expected = results(unfuse(copy.deepcopy(model)), shape)
    for blocks.fits in (False, True):
        torch.testing.assert_close(results(model, shape), expected, rtol=1e-12, atol=1e-12)
