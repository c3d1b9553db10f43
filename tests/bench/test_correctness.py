"""The check against float64: correct layers pass, and wrong outputs and gradients are found."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dcnet
from dcnet.bench import correctness
from dcnet.bench.layer_costs import make_layer
from dcnet.bench.naive import naive_conv
from dcnet.bench.shapes import Shape
from dcnet.testing import naive

SHAPE = Shape(2, 4, 6, 5)


def every_operator() -> list[str]:
    magnitudes = [f"{name}-cos" for name in dcnet.magnitude.registry]
    angles = [f"tanh-{name}" for name in dcnet.angle.registry]
    weightings = [f"tanh-cos+{name}" for name in dcnet.weighting.registry if name != "unweighted"]
    return [*magnitudes, *angles, *weightings, "tanh&log-cos+product", "tanh-sigmoid(learnable=True)"]


def layer_of(operator: str, dtype: torch.dtype = torch.float64) -> dcnet.DecoupledConv2d:
    """A layer whose constants differ between channels."""
    layer = make_layer(operator, SHAPE, dtype, "cpu")
    for name in layer.operator.learned:
        layer.get_parameter(name).data.mul_(1 + 0.2 * torch.rand(layer.get_parameter(name).shape).to(dtype))
    return layer


@pytest.mark.parametrize("operator", every_operator())
def test_naive_conv_equals_the_computation_by_patches(operator: str):
    layer, x = layer_of(operator), torch.randn(SHAPE.images, dtype=torch.float64)
    assert torch.allclose(naive_conv(layer, x), naive(layer, x), rtol=1e-10, atol=1e-12)


def errors(layer: torch.nn.Conv2d, call) -> dict[str, float]:
    return correctness.make_reference(layer, torch.randn(SHAPE.images).to(layer.weight)).errors(layer, call)


@pytest.mark.parametrize("operator", ["conv", *every_operator()])
def test_every_operator_passes_the_check(operator: str):
    layer = make_layer(operator, SHAPE, torch.float32, "cpu")
    found = errors(layer, layer)
    assert list(found) == ["output", *(f"gradient of {name}" for name in ("x", *dict(layer.named_parameters())))]
    assert correctness.worst(found, correctness.LAYER_TOLERANCES[torch.float32]) is None


def test_half_precision_passes_only_with_its_own_tolerance():
    layer = make_layer("tanh-cos", SHAPE, torch.bfloat16, "cpu")
    found = errors(layer, layer)
    assert correctness.worst(found, correctness.LAYER_TOLERANCES[torch.bfloat16]) is None
    assert correctness.worst(found, correctness.LAYER_TOLERANCES[torch.float32]) is not None


def test_a_wrong_output_is_named_with_its_error():
    layer = layer_of("tanh-cos", torch.float32)
    sentence = correctness.worst(errors(layer, lambda x: layer(x) * 1.001), 1e-4)
    assert sentence is not None
    assert sentence.endswith("is off by 1.0e-03 (tolerance 1e-04)")


def test_a_wrong_gradient_of_a_constant_is_named():
    class Skewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return 1.5 * gradient

    layer = layer_of("tanh-cos", torch.float32)
    parameters = dict(layer.named_parameters())

    def call(x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {**parameters, "radius": Skewed.apply(layer.radius)}, x)

    sentence = correctness.worst(errors(layer, call), 1e-4)
    assert sentence is not None
    assert sentence.startswith("gradient of radius is off by 5.0e-01")


def test_errors_that_are_not_finite_are_wrong_and_null_in_json():
    found = {"output": 0.0, "gradient of x": math.nan, "gradient of weight": 3.0}
    sentence = correctness.worst(found, 1e-2)
    assert sentence is not None
    assert sentence.startswith("gradient of x is off by nan")
    assert correctness.finite(found) == {"output": 0.0, "gradient of x": None, "gradient of weight": 3.0}


def test_the_worst_error_is_relative_to_its_own_tolerance():
    found = {"output": 0.04, "gradient of x": 0.3}
    assert correctness.worst(found, {"output": 0.05, "gradient of x": 0.4}) is None
    sentence = correctness.worst(found, {"output": 0.01, "gradient of x": 0.2})
    assert sentence == "output is off by 4.0e-02 (tolerance 1e-02)"


def test_gradients_of_constants_inside_networks_use_the_leaning_gradient():
    layer = layer_of("tanh-cos")
    whole = torch.nn.Sequential(layer)
    reference = correctness.make_reference(whole, torch.randn(SHAPE.images, dtype=torch.float64))
    alone = correctness.results(layer, layer, reference.inputs, reference.gradients)
    assert torch.equal(reference.expected["gradient of 0.radius"], alone["gradient of radius"])
    assert torch.equal(reference.expected["gradient of 0.weight"], alone["gradient of weight"])


def test_relative_error_by_hand():
    assert correctness.relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert correctness.relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_tolerances_match_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    rows = {
        name: (float(layer), float(network))
        for name, layer, network in re.findall(r"\| `(\w+)` \| (\S+) \| (\S+) \|", text)
    }
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in correctness.LAYER_TOLERANCES}
    assert rows == {
        name: (correctness.LAYER_TOLERANCES[dtype], correctness.NETWORK_TOLERANCES[dtype])
        for dtype, name in names.items()
    }
