"""The naive formulation of every kind of layer, compared with patches and with plain loops."""

import pytest
import torch

from dcnet.bench.layer_costs import make_layer
from dcnet.bench.naive import naive_output
from dcnet.bench.shapes import parse_shape
from dcnet.testing import naive

OPERATORS = ["tanh-cos", "seg-sqcos+linear", "log-linear+joint", "ball-sigmoid+product"]
SHAPES = ["M5x6-4", "N2xC4xL7xG2", "N2xC4x5x6xG4", "N2xC6x5xK5xG3", "N1xC2xD3x4", "N1xC4xD3x4xG2", "N2xC3x5xK1"]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("text", SHAPES)
def test_layers_equal_the_computation_by_patches(text: str, operator: str):
    shape = parse_shape(text)
    layer = make_layer(operator, shape, torch.float64, "cpu")
    for name in layer.operator.learned:
        layer.get_parameter(name).data.mul_(1 + 0.2 * torch.rand(layer.get_parameter(name).shape))
    x = torch.randn(shape.inputs["x"], dtype=torch.float64)
    torch.testing.assert_close(naive_output(layer, x), naive(layer, x), rtol=1e-10, atol=1e-12)


def test_attention_equals_plain_loops():
    shape = parse_shape("B2xH3xT5xD4")
    layer = make_layer("sphere(scale=Learnable(per_channel=True))-cos", shape, torch.float64, "cpu")
    layer.scale.data.copy_(torch.tensor([0.5, 1.0, 1.5]).view(layer.scale.shape))
    scales = layer.constants()
    query, key, value = (torch.randn(size, dtype=torch.float64) for size in shape.inputs.values())
    found = naive_output(layer, query, key, value)
    (scale,) = scales.values()
    for head in range(3):
        norms = [(one[:, head].square().sum(-1) + layer.eps).sqrt() for one in (query, key)]
        cos = query[:, head] @ key[:, head].mT / (norms[0].unsqueeze(-1) * norms[1].unsqueeze(-2))
        # A bounded score has the factor sqrt(E), here 2.
        expected = (2 * scale.flatten()[head] * cos).softmax(-1) @ value[:, head]
        torch.testing.assert_close(found[:, head], expected)


@pytest.mark.parametrize(
    "operator", ["sphere-cos", "linear-cos+linear", "log-sqcos+product", "tanh(radius=1.7)-linear+joint"]
)
def test_attention_equals_the_module(operator: str):
    shape = parse_shape("B2xH3xT5xD4")
    layer = make_layer(operator, shape, torch.float64, "cpu")
    inputs = [torch.randn(size, dtype=torch.float64) for size in shape.inputs.values()]
    torch.testing.assert_close(naive_output(layer, *inputs), layer(*inputs), rtol=1e-10, atol=1e-12)
