"""Right before fast: output and gradients against float64, before anything is timed."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcnet.bench.naive import naive_conv2d
from dcnet.layers import DecoupledConv2d

Layer = nn.Conv2d
Results = dict[str, Tensor]

# The largest ||found - expected|| / ||expected|| of an output or a gradient of one layer, by what it computes in.
LAYER_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}

# The same of the logits, or the loss, of a network, in which the roundings of all layers add up.
NETWORK_TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}


def results(layer: Layer, call: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Results:
    """The output, and the gradients of the input, the filters and every learned constant, by name."""
    parameters = dict(layer.named_parameters())
    output = call(x)
    gradients = torch.autograd.grad(output, [x, *parameters.values()], gradient.to(output))
    names = ["output", *(f"gradient of {name}" for name in ("x", *parameters))]
    return dict(zip(names, [output.detach(), *gradients], strict=True))


@dataclass(frozen=True)
class Reference:
    """An input, a gradient of the output, and what `results` should make of them."""

    x: Tensor
    gradient: Tensor
    expected: Results

    def errors(self, layer: Layer, call: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """||found - expected|| / ||expected|| of the output and every gradient."""
        found = results(layer, call, self.x, self.gradient)
        return {name: relative_error(found[name], value) for name, value in self.expected.items()}


def make_reference(layer: Layer, x: Tensor) -> Reference:
    """What a layer of these filters and constants should give: in float64, by the equation as it is written down."""
    exact = copy.deepcopy(layer).double()
    point = x.detach().double().requires_grad_()
    with _no_search():
        gradient = _gradient(_written_down(exact, point).detach()).to(x)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        expected = results(exact, lambda x: _written_down(exact, x), point, gradient)
    return Reference(x.detach().clone().requires_grad_(), gradient, expected)


def _gradient(output: Tensor) -> Tensor:
    """A gradient of the output, half random and half the output itself.

    Of a random one alone the gradient of a constant that all patches share is the sum of as many positive terms as
    negative ones, and next to nothing is no measure of errors.
    """
    return torch.randn_like(output) + output / output.square().mean().sqrt()


@contextlib.contextmanager
def _no_search() -> Iterator[None]:
    """Takes convolutions as they come: in float64 it takes longer to find the fastest than to use any of them."""
    searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searching


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    size = expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float((found.double() - expected).norm() / size)


def worst(errors: Mapping[str, float], tolerance: float) -> str | None:
    """What is off by most, as words, if it is more than the tolerance or not a number."""
    if all(error <= tolerance for error in errors.values()):
        return None
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return f"{name} is off by {errors[name]:.1e}, and {tolerance:.0e} is allowed"


def finite(errors: Mapping[str, float]) -> dict[str, float | None]:
    """The errors as a record can hold them: None for what is not finite."""
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def _written_down(layer: Layer, x: Tensor) -> Tensor:
    return naive_conv2d(layer, x) if isinstance(layer, DecoupledConv2d) else layer(x)
