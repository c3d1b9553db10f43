"""Running mean norms from data."""

import pytest
import torch
from torch import nn

import dcnet


def network():
    return nn.Sequential(
        dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), dcnet.DecoupledConv2d(4, 5, 3)
    )


def test_the_mean_over_the_data_takes_the_place_of_a_running_mean_that_lags():
    model = network().double()
    model(100 * torch.randn(4, 3, 8, 8, dtype=torch.float64))
    batches = [torch.randn(4, 3, 8, 8, dtype=torch.float64) * scale for scale in (1, 2, 3)]
    statistics = model[1].running_mean.clone()
    dcnet.update_norms(model, ((batch, None) for batch in batches))
    norms = [dcnet.functional.patch_norm(x, (3, 3), (1, 1), [(0, 0)] * 2, (1, 1)).mean() for x in batches]
    torch.testing.assert_close(model[0].mean_norm, torch.stack(norms).mean())
    assert torch.equal(model[1].running_mean, statistics)
    assert all(module.training for module in model.modules())


def test_bad_batches_leave_no_trace():
    model = network()
    good, bad = torch.randn(4, 3, 8, 8), torch.full((4, 3, 8, 8), torch.nan)
    dcnet.update_norms(model, [good])
    expected = model[0].mean_norm.clone()
    dcnet.update_norms(model, [good, bad])
    assert torch.equal(model[0].mean_norm, expected)
    dcnet.update_norms(model, [bad])
    assert torch.equal(model[0].mean_norm, expected)
    dcnet.update_norms(model, [])
    assert torch.equal(model[0].mean_norm, expected)


def test_a_failure_leaves_the_means_as_they_were():
    model = network().eval()
    model[0].mean_norm.fill_(2.5)
    with pytest.raises(TypeError, match="a batch must be a tensor or a tuple that starts with one, not a str"):
        dcnet.update_norms(model, [torch.randn(4, 3, 8, 8), "x"])
    assert model[0].mean_norm == 2.5
    assert not any(module.training for module in model.modules())


def test_one_tensor_is_no_list_of_batches():
    """Its images would be taken for batches of one, which layers take, too."""
    with pytest.raises(TypeError, match=r"a list of batches, not one tensor: give \[x\]"):
        dcnet.update_norms(network(), torch.randn(4, 3, 8, 8))
