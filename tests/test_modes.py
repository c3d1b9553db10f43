"""The search of convolutions."""

import pytest
import torch

from dcnet.modes import search_convolutions


@pytest.mark.parametrize(("all_plans", "limit"), [(True, 0), (False, 10)])
def test_all_plans_or_the_first_ten_are_timed(monkeypatch, all_plans, limit):
    settings = type("Settings", (), {"benchmark": False, "benchmark_limit": None})
    monkeypatch.setattr(torch.backends, "cudnn", settings)
    search_convolutions(all_plans)
    assert settings.benchmark
    assert settings.benchmark_limit == limit
