"""Runs: what they leave behind, and that interruptions change nothing."""

import pytest
import torch
from small_runs import ON_CPU, InterruptsAt, Noisy, Remembers, tiny, train, weights

from dcnet.training import Execution, Run, Trainer, load_model, read_record
from dcnet.training.records import CURVES
from dcnet.training.schedules import Plateau


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tiny(), tmp_path_factory.mktemp("runs"))


def test_a_record_says_it_all(finished):
    run, record = finished
    assert record == run.record() == read_record(run.folder)
    assert run.folder.name == f"digits-cnn9-small-tanh-cos-seed0-{tiny().hash}"
    assert (record["status"], record["steps"], record["steps_done"], record["steps_per_epoch"]) == ("done", 6, 6, 3)
    assert record["config"] == tiny().described()
    assert record["data"]["classes"] == [str(digit) for digit in range(10)]
    assert (record["data"]["train_images"], record["data"]["test_images"]) == (60, 1197)
    assert set(record["curves"]) == set(CURVES)
    assert record["curves"]["step"] == [3, 6]
    assert record["curves"]["epoch"] == [1, 2]
    assert record["results"]["test_accuracy"] == record["curves"]["test_accuracy"][-1]
    assert record["results"]["test_error"] == pytest.approx(100 - record["results"]["test_accuracy"])
    assert record["environment"]["torch"] == torch.__version__
    assert record["timings"]["total"] > 0
    assert not (run.folder / "checkpoints").exists()


def test_the_trained_network_comes_back(finished):
    run, record = finished
    model, found = load_model(run)
    assert found == record
    assert not model.training
    from dcnet.data import load_dataset

    test = load_dataset("digits").test
    with torch.no_grad():
        right = (model(test.images.float() / 255).argmax(1) == test.labels).float().mean().item()
    assert 100 * right == pytest.approx(record["results"]["test_accuracy"], abs=1e-4)


def test_the_same_config_gives_the_same_bits(finished, tmp_path):
    again, record = train(tiny(), tmp_path)
    assert weights(again) == weights(finished[0])
    assert record["curves"]["train_loss"] == finished[1]["curves"]["train_loss"]
    other, _ = train(tiny(seed=1), tmp_path)
    assert weights(other) != weights(again)


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_an_interrupted_run_goes_on_to_the_same_bits(finished, tmp_path, step):
    run, record = train(tiny(), tmp_path, watcher=InterruptsAt(step))
    assert (record["status"], record["steps_done"], record["results"]) == ("interrupted", step, record["results"])
    assert run.record()["results"] is None
    assert not run.model_file.exists()
    run, record = train(tiny(), tmp_path)
    assert record["status"] == "done"
    assert record["resumed_at"] == [step]
    assert weights(run) == weights(finished[0])
    same = ("step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate")
    assert all(record["curves"][name] == finished[1]["curves"][name] for name in same)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "lr": 0.05},
        {"optimizer": "adamw", "weight_decay": 0.01},
        {"projection_every": 2, "orthonormal": 1e-3},
        {"weighted_gradients": "update"},
        {"adversary": "pgd(steps=2)", "margin": "arcface", "annealing": "auto"},
        {"schedule": Plateau(patience=1, better=0.5), "evaluate_every": 1},
        {"operator": "conv", "label_smoothing": 0.1, "log_floor": 1e-4},
    ],
)
def test_all_that_a_run_remembers_is_in_its_checkpoint(tmp_path, changes):
    config = tiny(**changes)
    whole, _ = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", watcher=InterruptsAt(2))
    train(config, tmp_path / "parts", watcher=InterruptsAt(5))
    parts, record = train(config, tmp_path / "parts")
    assert record["resumed_at"] == [2, 5]
    assert weights(parts) == weights(whole)


def test_a_network_of_ones_own_with_dropout(tmp_path):
    config = tiny(operator="conv")
    whole, record = train(config, tmp_path / "whole", model=Noisy())
    assert record["parameters"] == 64 * 16 + 16 + 160 + 10
    train(config, tmp_path / "parts", watcher=InterruptsAt(4), model=Noisy())
    parts, _ = train(config, tmp_path / "parts", model=Noisy())
    assert weights(parts) == weights(whole)


def test_chance_is_another_at_each_step_and_for_each_seed(tmp_path):
    """Dropout that dropped the same features in every step would never train the others."""
    spaces = [Trainer(tiny(seed=seed), Run.of(tiny(seed=seed), tmp_path), ON_CPU).space for seed in (0, 1)]
    drawn = []
    for space in spaces:
        space.source.train = lambda step, train_step: drawn.append(torch.rand(()).item())
        for step in (0, 1, 2, 1):
            space.train_on(step, [])
    assert len(set(drawn)) == 6
    assert (drawn[3], drawn[7]) == (drawn[1], drawn[5])


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(finished, tmp_path):
    every = Execution(device="cpu", checkpoint_every=1)
    run, _ = train(tiny(), tmp_path, every, InterruptsAt(4))
    newest = run.checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    watcher = Remembers()
    run, record = train(tiny(), tmp_path, every, watcher)
    assert record["resumed_at"] == [3]
    assert any(newest.name in note and "the one before it is used" in note for note in watcher.notes)
    assert weights(run) == weights(finished[0])


def test_checkpoints_of_another_config_are_refused(tmp_path):
    run, _ = train(tiny(), tmp_path, watcher=InterruptsAt(2))
    with pytest.raises(ValueError, match="of another config"):
        Trainer(tiny(lr=0.5), run, ON_CPU)


# --- what is trained ---
