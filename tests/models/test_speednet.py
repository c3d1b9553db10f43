"""The small network for fast training: its whitening layer against plain loops, its structure, and any image size."""

import itertools

import pytest
import torch
from helpers.small_runs import tiny, train
from torch import nn

import dcnet
from dcnet.models.blocks import Whitening
from dcnet.training import Run, load_model
from dcnet.training.build import build_model
from dcnet.training.initialization import init_whitening_


def correlated_images() -> torch.Tensor:
    """Images whose pixels and channels are correlated."""
    torch.manual_seed(0)
    base = torch.randn(40, 1, 9, 9).cumsum(-1).cumsum(-2) / 5
    return base + 0.3 * torch.randn(40, 2, 9, 9)


def in_loops(images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """The inner products of filters and patches: [N, C, H, W] -> [N, filters, H - 1, W - 1]."""
    count, _, height, width = images.shape
    found = torch.zeros(count, len(filters), height - 1, width - 1, dtype=images.dtype)
    for n, f, y, x in itertools.product(range(count), range(len(filters)), range(height - 1), range(width - 1)):
        found[n, f, y, x] = (images[n, :, y : y + 2, x : x + 2] * filters[f]).sum()
    return found


def test_whitened_patches_are_uncorrelated_with_variance_one():
    images, layer = correlated_images().double(), Whitening(2).double()
    layer.fit_(images, eps=0.0)
    assert layer.weight.shape == (2 * 8, 2, 2, 2)
    outputs = in_loops(images, layer.weight)
    torch.testing.assert_close(layer(images), outputs)
    values = outputs[:, :8].transpose(0, 1).flatten(1)
    torch.testing.assert_close(values @ values.T / values.shape[1], torch.eye(8, dtype=torch.float64))
    assert torch.equal(outputs[:, 8:], -outputs[:, :8])


def test_eps_limits_the_gain_of_rare_directions():
    layer = Whitening(2).double()
    layer.fit_(correlated_images().double() * 1e-6, eps=5e-4)
    assert layer.weight.flatten(1).norm(dim=1).tolist() == pytest.approx([5e-4**-0.5] * 16, rel=1e-3)


def test_filters_are_orthonormal_before_the_fit_and_never_trained():
    layer = Whitening(3)
    rows = layer.weight[:12].flatten(1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(12))
    assert list(layer.parameters()) == []
    assert layer.state_dict().keys() == {"weight"}


def test_whitening_is_fitted_to_normalized_training_images_and_saved(tmp_path):
    config = tiny(model="speednet", pixel_mean=(0.3,), pixel_std=(0.25,), steps=3)
    run, _ = train(config, tmp_path)
    model, data = build_model(config, 10, 1, 8), dcnet.data.load_dataset("digits")
    first = model.network.body.conv0.whitening
    before = first.weight.clone()
    init_whitening_(model, data, 8)
    assert not torch.equal(first.weight, before)
    values = first(model.normalize(data.train.images.float() / 255))[:, :4].transpose(0, 1).flatten(1)
    assert (values @ values.T / values.shape[1]).diagonal().tolist() == pytest.approx([1.0] * 4, abs=0.02)
    trained = load_model(Run(run.folder))[0].network.body.conv0.whitening
    torch.testing.assert_close(trained.weight, first.weight)


def test_channels_and_sizes_of_the_stages():
    with torch.device("meta"):
        model = dcnet.create_model("speednet", "conv", 100)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in layers] == [128, 128, 384, 384, 512, 512]
    assert [layer.in_channels for layer in layers] == [24, 128, 128, 384, 384, 512]
    assert model.num_features == 512


@pytest.mark.parametrize("size", [4, 8, 20, 32])
def test_features_are_maxima_over_positions(size):
    torch.manual_seed(0)
    model = dcnet.create_model("speednet", "tanh-cos", 0, width=0.05).eval()
    maps = model.body[:-1](torch.randn(2, 3, size, size))
    side = size - 1
    for _ in range(3):
        side = -(-side // 2)
    assert maps.shape[2:] == (side, side)
    torch.testing.assert_close(model.body.pool(maps), maps.flatten(2).max(2).values)
