"""Layers by their names in papers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import dcnet
from dcnet import presets
from dcnet.testing import assert_decoupled

X = torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

OPERATORS = {
    presets.SphereConv2d: "sphere-cos",
    presets.BallConv2d: "ball-cos",
    presets.TanhConv2d: "tanh-cos",
    presets.LinearConv2d: "linear-cos",
    presets.SegConv2d: "seg-cos",
    presets.LogConv2d: "log-cos",
    presets.MixConv2d: "mix-cos",
    presets.BcosConv2d: "linear-power",
    presets.SharpenedCosine2d: "sphere-power",
}


@pytest.mark.parametrize("preset", OPERATORS, ids=lambda preset: preset.__name__)
def test_presets_have_their_operators(preset):
    layer = preset(4, 6, 3, padding=1, stride=2, groups=2, eps=1e-3, dtype=torch.float64)
    assert str(layer.operator) == OPERATORS[preset]
    assert (layer.stride, layer.groups, layer.eps) == ((2, 2), 2, 1e-3)
    assert_decoupled(layer)
    layer.eval()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(X), layer(X))
    assert getattr(dcnet, preset.__name__) is preset


def test_constants_angle_and_weighting_are_keyword_arguments():
    layer = presets.SegConv2d(
        4, 6, 3, slope=0.2, radius=2.0, learnable=True, angle="sqcos", weighting="linear", bias=False
    )
    assert str(layer.operator) == "seg(learnable=True,slope=0.2,radius=2.0)-sqcos+linear"
    assert layer.bias is None
    with pytest.raises(TypeError, match=r"SegConv2d takes no 'slop', only learnable, scale, slope"):
        presets.SegConv2d(4, 6, 3, slop=0.2)
    with pytest.raises(TypeError, match="SphereConv2d takes no 'operator'"):
        presets.SphereConv2d(4, 6, 3, operator="tanh-cos")


@pytest.mark.parametrize("b", [1.0, 1.5, 2.0, 4.0])
def test_bcos_matches_its_published_definition(b):
    layer = presets.BcosConv2d(4, 6, 3, b=b, eps=0.0, dtype=torch.float64)
    assert layer.bias is None
    unit = layer.weight / layer.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    linear = F.conv2d(X, unit)
    cos = linear / F.conv2d(X.square(), torch.ones_like(layer.weight[:1])).sqrt()
    torch.testing.assert_close(layer(X), cos.abs().pow(b - 1) * linear)


@pytest.mark.parametrize("q", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
def test_sharpened_cosine_similarity_matches_its_published_definition(p, q):
    layer = presets.SharpenedCosine2d(4, 6, 3, p=p, q=q, eps=0.0, dtype=torch.float64)
    assert layer.bias is None
    w_norm = layer.weight.flatten(1).norm(dim=1).view(-1, 1, 1)
    product = F.conv2d(X, layer.weight)
    x_norm = F.conv2d(X.square(), torch.ones_like(layer.weight[:1])).sqrt()
    expected = product.sign() * (product.abs() / ((w_norm + q) * (x_norm + q))) ** p
    torch.testing.assert_close(layer(X), expected)


@pytest.mark.parametrize("kind", [dcnet.BcosConv2d, dcnet.SharpenedCosine2d])
def test_presets_reject_an_operator(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no 'operator'"):
        kind(3, 4, 3, operator="tanh-cos")


@pytest.mark.parametrize("preset", [presets.BcosConv2d, presets.SharpenedCosine2d])
def test_bias_is_off_unless_requested(preset):
    assert preset(4, 4, 3, 1, 0, 1, 2).bias is None
    assert preset(4, 4, 3, 1, 0, 1, 2, True).bias is not None
    assert preset(4, 6, 3, bias=True).bias is not None
