"""Batch statistics, and the search of convolutions."""

import copy

import pytest
import torch
from torch import nn

import dcnet
from dcnet.modes import batch_statistics, kept_buffers, search_convolutions


@pytest.mark.parametrize(("all_plans", "limit"), [(True, 0), (False, 10)])
def test_all_plans_or_the_first_ten_are_timed(monkeypatch, all_plans, limit):
    settings = type("Settings", (), {"benchmark": False, "benchmark_limit": None})
    monkeypatch.setattr(torch.backends, "cudnn", settings)
    search_convolutions(all_plans)
    assert settings.benchmark
    assert settings.benchmark_limit == limit


def test_batch_statistics_are_used_and_running_ones_stay():
    torch.manual_seed(0)
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos"), nn.BatchNorm2d(4)).double()
    model(torch.rand(5, 3, 8, 8).double())
    twin, x = copy.deepcopy(model), 3 * torch.rand(6, 3, 8, 8).double()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = twin.train()(x)
    with batch_statistics(model):
        torch.testing.assert_close(model(x), expected)
    assert not torch.allclose(model(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def fail_after_a_batch(network: nn.BatchNorm1d) -> None:
    before = network.running_mean.clone()
    network(torch.randn(4, 3))
    assert not torch.equal(network.running_mean, before)
    raise KeyError


def test_buffers_are_restored_also_after_an_error():
    network = nn.BatchNorm1d(3)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(KeyError), kept_buffers(network):
        fail_after_a_batch(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
