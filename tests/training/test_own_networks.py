"""Networks of one's own that a trainer is given."""

import pytest
import torch
from small_runs import InterruptsAt, Noisy, tiny, train, weights
from torch import nn

import dcnet
from dcnet.losses import MarginSoftmax
from dcnet.models.margin_network import MarginNetwork
from dcnet.training.checkpoints import read_tensors


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Conv2d(channels, 4, 3) for channels in (1, 4, 4))
        self.third.weight = self.second.weight
        self.classes = nn.Linear(16, 10)

    def forward(self, input):
        return self.classes(self.third(self.second(self.first(input)).relu()).flatten(1))


def test_weights_that_layers_share_are_kept_under_both_names(tmp_path):
    networks = [dcnet.decouple(Tied(), "tanh-cos") for _ in range(3)]
    whole, record = train(tiny(), tmp_path / "whole", model=networks[0])
    tensors, _ = read_tensors(whole.model_file)
    assert record["status"] == "done"
    assert torch.equal(tensors["model.second.weight"], networks[0].third.weight)
    assert torch.equal(tensors["model.third.weight"], networks[0].third.weight)
    train(tiny(), tmp_path / "parts", watcher=InterruptsAt(4), model=networks[1])
    parts, _ = train(tiny(), tmp_path / "parts", model=networks[2])
    assert weights(parts) == weights(whole)


def test_a_network_that_torch_compile_has_wrapped(tmp_path):
    plain, compiled = Noisy(), Noisy()
    train(tiny(operator="conv"), tmp_path / "plain", model=plain)
    train(tiny(operator="conv"), tmp_path / "compiled", model=torch.compile(compiled, backend="eager"))
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_margin_needs_a_network_with_a_head(tmp_path):
    config = tiny(margin="arcface")
    with pytest.raises(ValueError, match=r"margin='arcface' is part of a network .* which Noisy does not: omit margin"):
        train(config, tmp_path, model=Noisy())
    with pytest.raises(TypeError, match=r"a network to train is an nn\.Module, not 'resnet18'"):
        train(config, tmp_path, model="resnet18")
    assert not list(tmp_path.iterdir())
    body = dcnet.create_model("cnn9-small", num_classes=0, width=0.1, in_channels=1, image_size=8)
    _, record = train(config, tmp_path, model=MarginNetwork(body, MarginSoftmax(body.num_features, 10, "arcface")))
    assert record["status"] == "done"
