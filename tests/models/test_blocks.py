"""A network with a margin head."""

import pytest
import torch

import dcnet
from dcnet.losses import MarginSoftmax
from dcnet.models.blocks import MarginNetwork


def network(features=None, **options):
    torch.manual_seed(0)
    body = dcnet.create_model("cnn9-small", "tanh-cos", 0, width=0.1, in_channels=1, image_size=8)
    return MarginNetwork(body, MarginSoftmax(features or body.num_features, 5, **options), features)


def test_logits_and_loss():
    model, x, labels = network(margin="arcface"), torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    model.eval()
    loss, logits = model(x, labels)
    assert torch.equal(logits, model(x))
    assert loss == model.head(model.features(x), labels)
    assert torch.equal(logits, model.head.logits(model.features(x)))


@pytest.mark.parametrize("features", [2, 3])
def test_two_features_for_a_plot(features):
    model, x = network(features), torch.randn(4, 1, 8, 8)
    assert model.features(x).shape == (4, features)
    loss, _ = model(x, torch.tensor([0, 1, 2, 3]))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_head_for_other_features_is_rejected():
    body = dcnet.create_model("cnn9-small", "conv", 0, width=0.1)
    with pytest.raises(ValueError, match="the head must take the network's 26 features, not 7"):
        MarginNetwork(body, MarginSoftmax(7, 3))
