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


@dataclass(frozen=True)
class Gradients:
    """Gradients of the output, for each of which something would cancel in the other.

    Of a random one the gradient of a constant that all patches share is the sum of as many positive terms as negative
    ones; of one that leans to the output the gradient of the filters is mostly along them, and that part the division
    by their norm takes away. Next to nothing is no measure of errors.
    """

    random: Tensor
    leaning: Tensor

    @classmethod
    def of(cls, output: Tensor, x: Tensor) -> "Gradients":
        random = torch.randn_like(output)
        leaning = torch.randn_like(output) + output / output.square().mean().sqrt()
        return cls(*[made.to(x).contiguous(memory_format=torch.channels_last) for made in (random, leaning)])


def results(layer: Layer, call: Callable[[Tensor], Tensor], x: Tensor, gradients: Gradients) -> Results:
    """The output, and the gradients of the input, the filters and every learned constant, by name."""
    parameters = dict(layer.named_parameters())
    direct = {"x": x, **{name: value for name, value in parameters.items() if name in ("weight", "bias")}}
    constants = {name: value for name, value in parameters.items() if name not in direct}
    found: Results = {}
    for wanted, gradient in ((direct, gradients.random), (constants, gradients.leaning)):
        if wanted:
            # Each has a forward pass of its own: a compiled one may use up what it keeps for the backward pass.
            output = call(x)
            found.setdefault("output", output.detach())
            values = torch.autograd.grad(output, list(wanted.values()), gradient.to(output))
            found.update({f"gradient of {name}": value for name, value in zip(wanted, values, strict=True)})
    return found


@dataclass(frozen=True)
class Reference:
    """An input, gradients of the output, and what `results` should make of them."""

    x: Tensor
    gradients: Gradients
    expected: Results

    def errors(self, layer: Layer, call: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """||found - expected|| / ||expected|| of the output and every gradient."""
        found = results(layer, call, self.x, self.gradients)
        return {name: relative_error(found[name], value) for name, value in self.expected.items()}


def make_reference(layer: Layer, x: Tensor) -> Reference:
    """What a layer of these filters and constants should give: in float64, by the equation as it is written down."""
    exact = copy.deepcopy(layer).double()
    point = x.detach().double().requires_grad_()
    with _no_search():
        gradients = Gradients.of(_written_down(exact, point).detach(), x)
        expected = results(exact, lambda x: _written_down(exact, x), point, gradients)
    return Reference(x.detach().clone().requires_grad_(), gradients, expected)


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
