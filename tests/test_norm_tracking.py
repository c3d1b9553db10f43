"""Running mean norms: those that training leaves behind, and those from data."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

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


def test_the_count_is_that_of_the_batches_in_the_mean():
    model = network()
    model(torch.randn(4, 3, 8, 8))
    assert model[0].num_batches_tracked == 1
    dcnet.update_norms(model, [torch.randn(4, 3, 8, 8)] * 3)
    assert model[0].num_batches_tracked == 3
    model[0].reset_parameters()
    assert model[0].num_batches_tracked == model[0].mean_norm == 0


@pytest.mark.parametrize("operator", ["tanh-cos", "ball-cos"])
def test_evaluation_is_within_a_point_of_training_mode_after_100_steps(operator):
    """Without batch normalisation norms grow by a multiple in these steps, which a decay of 0.999 hardly notices."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    layers = [dcnet.DecoupledConv2d(1 if i == 0 else 16, 16, 3, padding=1, operator=operator) for i in range(3)]
    body = [module for layer in layers for module in (layer, nn.ReLU())]
    model = nn.Sequential(*body, nn.Flatten(), dcnet.DecoupledLinear(1024, 64, operator=operator), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(300):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if step + 1 in (100, 300):
            own, running = accuracy(model, x, y, True), accuracy(model, x, y, False)
            assert own > 85
            assert abs(own - running) < 1


@torch.no_grad()
def accuracy(model, x, y, by_batch):
    """In %, with the mean norm of each batch itself or with the running one."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = torch.cat([model.train(by_batch)(images).argmax(1) for images in x.split(256)])
    model.load_state_dict(kept, strict=False)
    model.train()
    return 100 * (found == y).double().mean().item()


def test_a_state_dict_without_a_count_is_one_that_has_settled():
    """As checkpoints of older versions are, at whatever depth in the model."""
    model, other = network(), network()
    model(torch.randn(4, 3, 8, 8))
    state = {name: value for name, value in model.state_dict().items() if "3.num_batches" not in name}
    assert other.load_state_dict(state).missing_keys == []
    assert other[0].num_batches_tracked == 1
    before = other[3].mean_norm.item()
    other(torch.full((4, 3, 8, 8), 100.0))
    assert other[3].num_batches_tracked == 8991
    assert other[3].mean_norm.item() == pytest.approx(before, rel=0.5)


def test_a_state_dict_of_plain_layers_adds_no_count():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    missing = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3)).load_state_dict(plain.state_dict(), strict=False)
    assert missing.missing_keys == ["0.radius", "0.mean_norm", "0.num_batches_tracked"]
