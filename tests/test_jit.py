"""torch.jit.trace of layers in evaluation, and what it saves and loads again."""

import io
import warnings

import pytest
import torch
from torch import nn

import dcnet

LAYERS = {
    "linear": (lambda op: dcnet.DecoupledLinear(4, 5, operator=op), (6, 4)),
    "conv1d": (lambda op: dcnet.DecoupledConv1d(4, 5, 3, operator=op), (2, 4, 8)),
    "conv2d": (lambda op: dcnet.DecoupledConv2d(4, 6, 3, padding=1, groups=2, operator=op), (2, 4, 8, 8)),
    "conv3d": (lambda op: dcnet.DecoupledConv3d(4, 5, 2, padding=1, operator=op), (2, 4, 3, 3, 3)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
]


def traced(model, x):
    with warnings.catch_warnings():
        # Sizes that are checked are constants of a trace.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        found = torch.jit.trace(model, x)
    content = io.BytesIO()
    torch.jit.save(found, content)
    content.seek(0)
    return found, torch.jit.load(content)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    "operator", ["tanh-cos", "seg-sqcos", "linear-cos", "log-sigmoid+product", "ball-spline+joint"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_traced_layer_agrees_before_and_after_it_is_saved(kind, operator, folded):
    make, shape = LAYERS[kind]
    model = nn.Sequential(make(operator), nn.ReLU())
    model(torch.randn(shape))
    model = dcnet.fold(model) if folded else model.eval()
    other = torch.randn(shape[0] + 3, *shape[1:])
    for found in traced(model, torch.randn(shape)):
        torch.testing.assert_close(found(other), model(other))


def test_a_traced_layer_alone_agrees():
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    layer(torch.randn(2, 3, 8, 8))
    layer.eval()
    for found in traced(layer, torch.randn(1, 3, 8, 8)):
        x = torch.randn(4, 3, 10, 9)
        torch.testing.assert_close(found(x), layer(x))


def test_a_traced_network_agrees():
    model = dcnet.create_model("cnn9-small", "tanh-cos", num_classes=5, width=0.25, in_channels=1, image_size=16)
    model(torch.randn(4, 1, 16, 16))
    for found in traced(model.eval(), torch.randn(2, 1, 16, 16)):
        x = torch.randn(5, 1, 16, 16)
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)
