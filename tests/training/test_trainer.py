"""The trainer: records, checkpoints, and runs that resume to the same bits."""

import dataclasses
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.small_runs import ON_CPU, InterruptsAt, Noisy, Remembers, tiny, train, weights

from dcnet.data import Augmentation, Batches, load_dataset
from dcnet.robustness import accuracy
from dcnet.training import Callback, Execution, Run, Trainer, load_model, read_record
from dcnet.training.record import Curves
from dcnet.training.schedules import Linear, Plateau
from dcnet.training.step import Meter


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tiny(), tmp_path_factory.mktemp("runs"))


def test_the_record_is_complete(finished):
    run, record = finished
    assert record == run.record() == read_record(run.folder)
    assert run.folder.name == f"digits-cnn9-small-tanh-cos-seed0-{tiny().hash}"
    assert (record.status, record.steps, record.steps_done, record.steps_per_epoch) == ("done", 6, 6, 3)
    assert record.config == tiny().described()
    assert record.data.classes == [str(digit) for digit in range(10)]
    assert (record.data.train_images, record.data.test_images) == (60, 1197)
    assert set(record.curves.to_json()) == set(Curves.names()) - {"refreshed_accuracy"}
    assert record.curves.step == [3, 6]
    assert record.curves.epoch == [1, 2]
    assert record.results.test_accuracy == record.curves.test_accuracy[-1]
    assert record.results.test_error == pytest.approx(100 - record.results.test_accuracy)
    assert record.environment["torch"] == torch.__version__
    assert record.timings.total > 0
    assert not (run.folder / "checkpoints").exists()


def test_load_model_returns_the_trained_network(finished):
    run, record = finished
    model, found = load_model(run)
    assert found == record
    assert not model.training
    from dcnet.data import load_dataset

    test = load_dataset("digits").test
    with torch.no_grad():
        right = (model(test.images.float() / 255).argmax(1) == test.labels).float().mean().item()
    assert 100 * right == pytest.approx(record.results.test_accuracy, abs=1e-4)


def test_equal_configs_give_equal_bits(finished, tmp_path):
    again, record = train(tiny(), tmp_path)
    assert weights(again) == weights(finished[0])
    assert record.curves.train_loss == finished[1].curves.train_loss
    other, _ = train(tiny(seed=1), tmp_path)
    assert weights(other) != weights(again)


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_an_interrupted_run_resumes_to_the_same_bits(finished, tmp_path, step):
    run, record = train(tiny(), tmp_path, callback=InterruptsAt(step))
    assert (record.status, record.steps_done, record.results) == ("interrupted", step, record.results)
    assert run.record().results is None
    assert not run.model_file.exists()
    run, record = train(tiny(), tmp_path)
    assert record.status == "done"
    assert record.resumed_at == [step]
    assert weights(run) == weights(finished[0])
    same = ("step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate")
    assert all(getattr(record.curves, name) == getattr(finished[1].curves, name) for name in same)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "lr": 0.05},
        {"optimizer": "adamw", "weight_decay": 0.01},
        {"optimizer": "muon", "weight_decay": 0.01, "projection_every": 1},
        {"optimizer": "sphere-sgd", "lr": 0.05, "momentum": 0.8},
        {"projection_every": 2, "orthonormal": 1e-3},
        {"weighted_gradients": "update"},
        {"adversary": "pgd(steps=2)", "margin": "arcface", "annealing": "auto"},
        {"schedule": Plateau(patience=1, better=0.5), "evaluate_every": 1},
        {"operator": "conv", "label_smoothing": 0.1, "log_floor": 1e-4},
        {"augmentation": Augmentation(brightness=0.3, contrast=0.8), "standardize": "image"},
        {
            "model": "speednet",
            "progressive_sizes": "4:0.3,6:0.8",
            "augmentation": Augmentation(flip=True, alternate_flips=True),
            "schedule": Linear(),
            "optimizer": "muon",
            "other_rate": 0.1,
        },
    ],
)
def test_checkpoints_hold_the_whole_state_of_training(tmp_path, changes):
    config = tiny(**changes)
    whole, _ = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", callback=InterruptsAt(2))
    train(config, tmp_path / "parts", callback=InterruptsAt(5))
    parts, record = train(config, tmp_path / "parts")
    assert record.resumed_at == [2, 5]
    assert weights(parts) == weights(whole)


REFRESHING = Execution(device="cpu", refresh_batches=2)


def test_refreshed_evaluations_change_neither_training_nor_results(tmp_path):
    config = tiny(norm_momentum=1e-3)
    _, plain = train(config, tmp_path / "plain")
    run, record = train(config, tmp_path / "refreshed", REFRESHING)
    assert weights(run) == weights(Run.of(config, tmp_path / "plain"))
    assert record.results == plain.results
    assert record.curves.test_accuracy == plain.curves.test_accuracy
    assert plain.curves.refreshed_accuracy == []
    assert len(record.curves.refreshed_accuracy) == len(record.curves)
    assert record.curves.refreshed_accuracy != record.curves.test_accuracy
    assert read_record(run.record_file).curves.refreshed_accuracy == record.curves.refreshed_accuracy


def test_refreshed_evaluations_use_statistics_of_the_first_training_batches(tmp_path):
    config = tiny(norm_momentum=1e-3, operator="linear-cos")
    run, record = train(config, tmp_path, REFRESHING)
    model, data = load_model(run)[0], load_dataset("digits")
    batches = Batches(data.train.subset(60, 10), config.batch_size, config.augmentation, config.seed)
    images = [batches.images(batches.draws(step))[0] for step in range(2)]
    torch.optim.swa_utils.update_bn(images, model)
    found = accuracy(model.eval(), data.test.images, data.test.labels)
    assert record.curves.refreshed_accuracy[-1] == pytest.approx(100 * found, abs=0.1)


@pytest.mark.parametrize("first", [ON_CPU, REFRESHING])
def test_refreshed_evaluations_resume_to_the_same_bits(tmp_path, first):
    config = tiny(epochs=3)
    whole, expected = train(config, tmp_path / "whole", REFRESHING)
    _, record = train(config, tmp_path, first, InterruptsAt(4))
    assert record.status == "interrupted"
    run, record = train(config, tmp_path, REFRESHING)
    assert weights(run) == weights(whole)
    known = expected.curves.refreshed_accuracy
    assert record.curves.refreshed_accuracy == (known if first is REFRESHING else [None, *known[1:]])


def test_a_custom_network_with_dropout_resumes_to_the_same_bits(tmp_path):
    config = tiny(operator="conv")
    whole, record = train(config, tmp_path / "whole", model=Noisy())
    assert record.parameters == 64 * 16 + 16 + 160 + 10
    train(config, tmp_path / "parts", callback=InterruptsAt(4), model=Noisy())
    parts, _ = train(config, tmp_path / "parts", model=Noisy())
    assert weights(parts) == weights(whole)


def test_random_numbers_differ_by_step_and_seed(tmp_path):
    """With the same random numbers in every step, dropout would never train some features."""
    setups = [Trainer(tiny(seed=seed), Run.of(tiny(seed=seed), tmp_path), ON_CPU).setup for seed in (0, 1)]
    drawn = []
    for setup in setups:
        setup.source.train = lambda step, train_step: drawn.append(torch.rand(()).item())
        for step in (0, 1, 2, 1):
            setup.train_step(step, [])
    assert len(set(drawn)) == 6
    assert (drawn[3], drawn[7]) == (drawn[1], drawn[5])


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(finished, tmp_path):
    every = Execution(device="cpu", checkpoint_every=1)
    run, _ = train(tiny(), tmp_path, every, InterruptsAt(4))
    newest = run.checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    callback = Remembers()
    run, record = train(tiny(), tmp_path, every, callback)
    assert record.resumed_at == [3]
    assert any(newest.name in note and "using the one before it" in note for note in callback.notes)
    assert weights(run) == weights(finished[0])


def test_checkpoints_of_another_config_raise_an_error(tmp_path):
    run, _ = train(tiny(), tmp_path, callback=InterruptsAt(2))
    with pytest.raises(ValueError, match="belong to another config"):
        Trainer(tiny(lr=0.5), run, ON_CPU)


def test_resuming_does_not_need_the_pretrained_weights(tmp_path):
    plain, _ = train(tiny(operator="conv"), tmp_path)
    config = tiny(pretrained=str(plain.folder))
    whole, _ = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", callback=InterruptsAt(4))
    shutil.rmtree(plain.folder)
    parts, record = train(config, tmp_path / "parts")
    assert record.status == "done"
    assert parts.model_file.read_bytes() == whole.model_file.read_bytes()


def test_resuming_with_other_classes_raises_an_error(tmp_path):
    data = load_dataset("digits")
    train(tiny(), tmp_path, callback=InterruptsAt(4), dataset=data)
    other = dataclasses.replace(data, classes=tuple("abcdefghij"))
    with pytest.raises(ValueError, match=r"started with the classes 0, 1, 2, \.\.\., but the data have a, b, c"):
        train(tiny(), tmp_path, dataset=other)


def test_resuming_with_other_images_raises_an_error(tmp_path):
    """With more or fewer images the length of an epoch would change."""
    data, config = load_dataset("digits"), tiny(train_images=None, steps=5)
    run, _ = train(config, tmp_path, callback=InterruptsAt(4), dataset=data)
    fewer = dataclasses.replace(data, train=data.train.subset(590, 10))
    with pytest.raises(ValueError, match="the run started with 600 training images, but there are 590 now"):
        train(config, tmp_path, dataset=fewer)
    # The run is unchanged, and resumes with its own images.
    assert run.record().status == "interrupted"
    assert train(config, tmp_path, dataset=data)[1].status == "done"


def test_without_an_undamaged_checkpoint_the_run_starts_again(tmp_path):
    run, _ = train(tiny(), tmp_path, callback=InterruptsAt(4))
    (only,) = run.checkpoints.files()
    only.write_bytes(b"")
    callback = Remembers()
    _, record = train(tiny(), tmp_path, callback=callback)
    assert record.status == "done"
    assert not record.resumed_at
    assert callback.notes[0].endswith("; the run starts again")


def test_temporary_files_of_interrupted_writes_are_removed(tmp_path):
    run = Run.of(tiny(), tmp_path)
    run.folder.mkdir()
    leftovers = [run.folder / name for name in (".record.json.1.tmp", ".model.safetensors.1.tmp")]
    for path in leftovers:
        path.write_text("")
    Trainer(tiny(), run, ON_CPU)
    assert not any(path.exists() for path in leftovers)


def test_other_files_beside_the_checkpoints_are_kept(tmp_path):
    run, _ = train(tiny(), tmp_path, callback=InterruptsAt(4))
    kept = run.checkpoints.folder / "kept.safetensors"
    shutil.copy(run.checkpoints.files()[0], kept)
    _, record = train(tiny(), tmp_path)
    assert record.status == "done"
    assert list(run.checkpoints.folder.iterdir()) == [kept]


def test_only_the_first_process_restores_the_sums_of_the_meter():
    """A checkpoint has the sums of all processes, which must be restored once."""
    cpu = torch.device("cpu")
    saved = Meter(cpu, join=lambda value: 2 * value)
    saved.add(torch.tensor(1.0), torch.tensor(3), 10)
    state = saved.state()
    assert state["meter.totals"].tolist() == [20, 6, 20]
    totals = []
    for is_first in (True, False):
        meter = Meter(cpu, is_first=is_first)
        meter.restore_(state)
        assert meter.step == 1
        totals.append(meter.totals.tolist())
    assert totals == [[20, 6, 20], [0, 0, 0]]


class EndsAt(Callback):
    """Ends training like `kill -9`: nothing is written afterwards."""

    def __init__(self, step):
        self.step = step

    def on_step(self, done, loss, accuracy, images_per_second):
        if done == self.step:
            raise MemoryError


def ended_at(step, root, **execution):
    config = tiny(epochs=5)
    with pytest.raises(MemoryError):
        train(config, root, Execution(device="cpu", **execution), EndsAt(step))
    run = Run.of(config, root)
    return run, [file.name for file in run.checkpoints.files()]


def test_checkpoints_by_time_are_written_after_evaluations(tmp_path):
    """An epoch has three steps, and ends with an evaluation."""
    run, found = ended_at(8, tmp_path, checkpoint_seconds=0)
    assert found == ["step-00000003.safetensors", "step-00000006.safetensors"]
    record = run.record()
    assert (record.status, record.steps_done, record.results) == ("running", 6, None)
    assert record.curves.step == [3, 6]
    again, record = train(tiny(epochs=5), tmp_path)
    assert record.resumed_at == [6]
    assert weights(again) == weights(train(tiny(epochs=5), tmp_path / "whole")[0])


def test_no_checkpoint_before_checkpoint_seconds(tmp_path):
    assert ended_at(8, tmp_path, checkpoint_seconds=3600)[1] == []


def test_checkpoint_seconds_count_from_the_last_checkpoint(tmp_path, monkeypatch):
    now = iter(range(0, 10**6, 10))
    clocks = SimpleNamespace(monotonic=lambda: next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("dcnet.training.trainer.time", clocks)
    # The clock is read at each epoch and at each checkpoint: the third epoch ends 10 s after a checkpoint.
    _, found = ended_at(14, tmp_path, checkpoint_seconds=20)
    assert found == ["step-00000006.safetensors", "step-00000012.safetensors"]


def test_curves_are_means_since_the_previous_evaluation(tmp_path):
    each, both = Remembers(), Remembers()
    train(tiny(evaluate_every=1), tmp_path, ON_CPU, each)
    train(tiny(evaluate_every=3), tmp_path, ON_CPU, both)
    losses = [point.train_loss for point in each.points]
    expected = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [point.train_loss for point in both.points] == pytest.approx(expected, rel=1e-6)


def test_a_run_that_ended_before_its_first_checkpoint_keeps_its_sharded_head(tmp_path):
    config = tiny(margin="arcface")
    run = Run.of(config, tmp_path)

    def started(**options):
        again = options.pop("again", False)
        return Trainer(config, run, Execution(device="cpu", **options), again=again).execution.shard_head

    assert started(shard_head=True) is True
    assert started() is True
    assert run.record().execution["shard_head"] is True
    assert started(again=True) is None
    assert started(shard_head=False) is False
    assert started() is None
