"""Training on a GPU: captured steps match eager ones, and interrupted runs resume."""

import pytest
import torch
from helpers.small_runs import InterruptsAt, tiny, train

from dcnet import DecoupledConv2d
from dcnet.training import DivergenceError, Execution, load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GRAPH, NO_GRAPH, CPU = (Execution(device="cuda"), Execution(device="cuda", graph=False), Execution(device="cpu"))
TRICKS = {"projection_every": 4, "orthonormal": 1e-3, "weight_decay": 1e-3}


def losses(record):
    return record.curves.train_loss


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon", "sphere-sgd"])
def test_captured_steps_have_the_losses_of_eager_steps(tmp_path, optimizer):
    config = tiny(steps=12, optimizer=optimizer, **TRICKS)
    _, captured = train(config, tmp_path / "graph", GRAPH)
    _, called = train(config, tmp_path / "calls", NO_GRAPH)
    _, on_cpu = train(config, tmp_path / "cpu", CPU)
    assert captured.execution["graph"]
    assert not called.execution["graph"]
    assert losses(captured) == pytest.approx(losses(called), rel=1e-3)
    # Muon iterates in bfloat16 on a GPU.
    assert losses(captured) == pytest.approx(losses(on_cpu), rel=0.1 if optimizer == "muon" else 2e-2)


@pytest.mark.parametrize(
    "margin",
    [
        *("a-softmax", "arcface", "sphereface2", "uniface", "combined", "subcenter-arcface"),
        *("adaface", "magface", "curricularface", "elastic-arcface", "elastic-cosface"),
    ],
)
def test_steps_with_margins_are_captured(tmp_path, margin):
    config = tiny(steps=12, margin=margin, features=8, annealing="auto")
    _, captured = train(config, tmp_path / "graph", GRAPH)
    _, called = train(config, tmp_path / "calls", NO_GRAPH)
    assert losses(captured) == pytest.approx(losses(called), rel=1e-3)


@pytest.mark.parametrize("operator", ["conv", "tanh-cos"])
def test_each_image_size_is_captured(tmp_path, operator):
    sizes = {"model": "speednet", "operator": operator, "progressive_sizes": "4:0.35,6:0.7"}
    config = tiny(steps=20, optimizer="muon", evaluate_every=5, **sizes)
    _, captured = train(config, tmp_path / "graph", GRAPH)
    _, called = train(config, tmp_path / "calls", NO_GRAPH)
    assert losses(captured) == pytest.approx(losses(called), rel=1e-3)
    train(config, tmp_path / "parts", GRAPH, InterruptsAt(9))
    _, parts = train(config, tmp_path / "parts", GRAPH)
    assert losses(parts) == pytest.approx(losses(captured), rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_a_compiled_constraint_is_captured(tmp_path):
    config = tiny(steps=12, orthonormal=1.0)
    _, compiled = train(config, tmp_path / "compiled", Execution(device="cuda", compile=True))
    _, called = train(config, tmp_path / "called", GRAPH)
    assert losses(compiled) == pytest.approx(losses(called), rel=1e-2)
    _, free = train(tiny(steps=12), tmp_path / "free", GRAPH)
    assert losses(free) != pytest.approx(losses(called), rel=1e-2), "the constraint must have an effect"


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "sphere-sgd"])
def test_an_interrupted_run_resumes(tmp_path, optimizer):
    """Filters are channels-last on a GPU, and so must be the restored state of the optimizer."""
    config = tiny(steps=12, optimizer=optimizer, evaluate_every=1, **TRICKS)
    _, whole = train(config, tmp_path / "whole", GRAPH)
    train(config, tmp_path / "parts", GRAPH, InterruptsAt(7))
    run, parts = train(config, tmp_path / "parts", GRAPH)
    assert parts.resumed_at == [7]
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)
    model, _ = load_model(run)
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("graph", [True, False])
def test_refreshed_evaluations_leave_captured_steps_unchanged(tmp_path, graph):
    config = tiny(steps=12, evaluate_every=3, norm_momentum=1e-3, **TRICKS)
    _, plain = train(config, tmp_path / "plain", Execution(device="cuda", graph=graph))
    _, refreshed = train(config, tmp_path / "refreshed", Execution(device="cuda", graph=graph, refresh_batches=2))
    _, on_cpu = train(config, tmp_path / "cpu", Execution(device="cpu", refresh_batches=2))
    assert losses(refreshed) == pytest.approx(losses(plain), rel=1e-3)
    assert refreshed.results.test_accuracy == pytest.approx(plain.results.test_accuracy, abs=1)
    assert refreshed.curves.refreshed_accuracy == pytest.approx(on_cpu.curves.refreshed_accuracy, abs=3)


def test_half_precision_trains(tmp_path):
    _, record = train(tiny(epochs=12, width=0.5, train_images=300, precision="bfloat16"), tmp_path, GRAPH)
    assert record.results.test_accuracy > 85


def test_captured_steps_read_the_current_learning_rate(tmp_path):
    from dcnet.training.schedules import Steps

    config = tiny(steps=12, optimizer="sgd", lr=1.0, schedule=Steps((6,), drop=1e-9), evaluate_every=1)
    _, record = train(config, tmp_path, GRAPH)
    rates = record.curves.learning_rate
    assert rates[5] == 1.0
    assert rates[6] == pytest.approx(1e-9)


def test_captured_steps_detect_a_loss_that_is_not_finite(tmp_path):
    """It is detected some steps later, and does not reach the weights."""
    with pytest.raises(DivergenceError, match=r"the loss or a gradient of step \d+ is not finite"):
        train(tiny(steps=200, operator="conv", norm="none", optimizer="sgd", lr=1e6), tmp_path, GRAPH)


def test_a_projection_in_every_step_is_captured(tmp_path):
    config = tiny(steps=12, projection_every=1)
    run, captured = train(config, tmp_path / "graph", GRAPH)
    _, called = train(config, tmp_path / "calls", NO_GRAPH)
    assert losses(captured) == pytest.approx(losses(called), rel=1e-3)
    for layer in load_model(run)[0].modules():
        if isinstance(layer, DecoupledConv2d):
            torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.ones(len(layer.weight)))
