"""Running statistics begin where the network is."""

import torch
from small_runs import tiny, train
from torch import nn

import dcnet
from dcnet.training.statistics import forget_statistics_, start_statistics_


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.BatchNorm1d(4 * 36, momentum=None),
    )


def test_they_are_those_of_the_batch_and_nothing_else_changes():
    model, x = network().train(), torch.rand(5, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_statistics_(model, lambda: model(x))
    with torch.no_grad():
        seen = model[0](x)
    torch.testing.assert_close(model[1].running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(model[1].running_var, seen.var((0, 2, 3)))
    assert (model[1].momentum, model[4].momentum) == (0.1, None)
    changed = ("1.running_mean", "1.running_var")
    for name in ("mean_norm", "num_batches_tracked"):
        model[0].get_buffer(name).copy_(before[f"0.{name}"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in changed), name


def test_a_batch_that_is_not_finite_leaves_them_as_they_are():
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_statistics_(model, lambda: model(torch.full((5, 3, 8, 8), float("nan"))))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_network_that_was_trained_keeps_its_own_unless_its_operator_changed():
    model = network().train()
    model(torch.rand(5, 3, 8, 8))
    before = model[1].running_var.clone()
    x = torch.rand(5, 3, 8, 8)
    start_statistics_(model, lambda: model(x))
    assert torch.equal(model[1].running_var, before)
    forget_statistics_(model)
    start_statistics_(model, lambda: model(x))
    assert not torch.allclose(model[1].running_var, before)


def test_what_interrupts_leaves_the_momenta_as_they_are():
    model = network().train()

    def look():
        raise KeyboardInterrupt

    try:
        start_statistics_(model, look)
    except KeyboardInterrupt:
        assert model[1].momentum == 0.1
    else:
        raise AssertionError


def test_a_network_without_statistics_sees_no_batch():
    def look():
        raise AssertionError

    start_statistics_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), look)


def test_a_short_training_is_not_at_chance(tmp_path):
    _, record = train(tiny(train_images=600, batch_size=30, width=0.25, epochs=2), tmp_path)
    assert record["results"]["test_accuracy"] > 60
