"""Checks outputs and gradients against float64 before anything is timed."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dcnet.bench.naive import naive_output
from dcnet.modes import full_precision

Results = dict[str, Tensor]
Call = Callable[..., Tensor]
# The inputs of a layer, by name; a single tensor is named x.
Inputs = Mapping[str, Tensor]

# Largest allowed ||found - expected|| / ||expected|| of the output or a gradient of a layer, by dtype.
LAYER_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}

# The same for the logits or the loss of a network, where rounding errors of the layers accumulate.
NETWORK_TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Gradients:
    """Two gradients of the output: with either alone, some result nearly cancels, and its relative error is noise.

    With a random gradient, that of a constant shared by all patches is a sum of terms of both signs. With a gradient
    correlated with the output, that of the filters is mostly parallel to them, which normalization removes.
    """

    random: Tensor
    leaning: Tensor

    @classmethod
    def of(cls, output: Tensor, x: Tensor) -> "Gradients":
        random = torch.randn_like(output)
        leaning = torch.randn_like(output) + output / output.square().mean().sqrt()
        channels_last = x.dim() == 4 and not x.is_contiguous()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return cls(*[made.to(x).contiguous(memory_format=layout) for made in (random, leaning)])


def results(layer: nn.Module, call: Call, given: Tensor | Inputs, gradients: Gradients) -> Results:
    """The output and the gradients of the inputs, the filters and every learned constant, by name."""
    inputs = named_inputs(given)
    parameters = dict(layer.named_parameters())
    weights = {name: value for name, value in parameters.items() if name.rpartition(".")[2] in ("weight", "bias")}
    direct = {**inputs, **weights}
    constants = {name: value for name, value in parameters.items() if name not in direct}
    found: Results = {}
    for wanted, gradient in ((direct, gradients.random), (constants, gradients.leaning)):
        if wanted:
            # A second forward pass, since a compiled one may free its saved tensors in the first backward pass.
            output = call(*inputs.values())
            found.setdefault("output", output.detach())
            values = torch.autograd.grad(output, list(wanted.values()), gradient.to(output))
            found.update({f"gradient of {name}": value for name, value in zip(wanted, values, strict=True)})
    return found


@dataclass(frozen=True)
class Reference:
    """Inputs, gradients of the output, and the expected `results`."""

    inputs: Inputs
    gradients: Gradients
    expected: Results

    def errors(self, layer: nn.Module, call: Call) -> dict[str, float]:
        """||found - expected|| / ||expected|| of the output and every gradient."""
        found = results(layer, call, self.inputs, self.gradients)
        return {name: relative_error(found[name], value) for name, value in self.expected.items()}


def make_reference(layer: nn.Module, given: Tensor | Inputs) -> Reference:
    """The expected results in float64: of a layer by the naive formulation, of a network by its modules."""
    exact, inputs = copy.deepcopy(layer).double(), named_inputs(given)
    point = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    # Also turns off the algorithm search of cuDNN, which would take longer than the convolution in float64.
    with full_precision():
        gradients = Gradients.of(naive_output(exact, *point.values()).detach(), next(iter(inputs.values())))
        expected = results(exact, lambda *tensors: naive_output(exact, *tensors), point, gradients)
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    return Reference(copies, gradients, expected)


def named_inputs(given: Tensor | Inputs) -> Inputs:
    return {"x": given} if isinstance(given, Tensor) else given


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    size = expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float((found.double() - expected).norm() / size)


def worst(errors: Mapping[str, float], tolerance: float | Mapping[str, float]) -> str | None:
    """A message about the error that is above its tolerance by the largest factor, or NaN."""
    limits = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(errors, tolerance)
    if all(error <= limits[name] for name, error in errors.items()):
        return None
    excess = {name: math.inf if math.isnan(error) else error / limits[name] for name, error in errors.items()}
    name = max(excess, key=lambda name: excess[name])
    return f"{name} is off by {errors[name]:.1e} (tolerance {limits[name]:.0e})"


def finite(errors: Mapping[str, float]) -> dict[str, float | None]:
    """The errors for a JSON record: None if not finite."""
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


Module = TypeVar("Module", bound=nn.Module)


def random_images(shape: Sequence[int], device: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Random images [N, C, H, W], channels last, which depend on shape, seed and type of device."""
    return random_values(shape, device, dtype, seed).to(memory_format=torch.channels_last)


def random_values(shape: Sequence[int], device: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, which depend on shape, seed and type of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def placed(module: Module, device: str, dtype: torch.dtype = torch.float32) -> Module:
    """Moves and casts the module in place, with channels-last filters."""
    # The type stubs of torch lack memory_format for modules.
    channels_last: dict[str, Any] = {"memory_format": torch.channels_last}
    return module.to(device, dtype).to(**channels_last)
