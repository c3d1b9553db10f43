"""Evaluation during training, and snapshots of features, also of interrupted runs."""

import dataclasses

import pytest
import torch
from helpers.small_runs import ON_CPU, InterruptsAt, tiny, train
from torch import nn

from dcnet.data import load_dataset
from dcnet.training import Execution, load_model
from dcnet.training.evaluation import Evaluator, read_history
from dcnet.training.tensor_files import write_tensors


class Merging(nn.Linear):
    """A layer with merged weights in evaluation mode, as those of LoRA."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_evaluation_restores_the_mode_of_every_layer():
    """Layers may override train(); a layer that was in evaluation mode stays in it."""
    layers = [Merging(4, 4), Merging(4, 4), nn.Dropout()]
    model = nn.Sequential(*layers)
    layers[1].eval()
    reading = Evaluator(model, torch.device("cpu"))([(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))])
    assert reading.bad_step is None
    assert [layer.training for layer in (model, *layers)] == [True, True, False, True]
    assert [layer.merged for layer in layers[:2]] == [False, True]


SMALL = {"margin": "a-softmax", "features": 2, "feature_snapshots": 40}


def test_the_last_snapshot_has_the_features_of_the_trained_network(tmp_path):
    run, record = train(tiny(**SMALL), tmp_path)
    found = read_history(run.features_file)
    assert found.steps.tolist() == record.curves.step == [3, 6]
    assert (found.points.shape, found.directions.shape) == ((2, 40, 2), (2, 10, 2))
    model, _ = load_model(run)
    kept = load_dataset("digits").test.subset(40, 10)
    with torch.no_grad():
        points = model.features(kept.images.float() / 255)
    torch.testing.assert_close(found.points[-1], points)
    assert torch.equal(found.directions[-1], model.network.head.weight)
    assert torch.equal(found.labels, kept.labels)
    assert found.labels.unique().tolist() == list(range(10))


def test_snapshots_have_one_direction_per_class(tmp_path):
    """The mean of the directions of its centers."""
    run, _ = train(tiny(**SMALL | {"margin": "subcenter-arcface(k=2)"}), tmp_path)
    found = read_history(run.features_file).directions
    units = torch.nn.functional.normalize(load_model(run)[0].network.head.weight.detach())
    torch.testing.assert_close(found[-1], (units[0::2] + units[1::2]) / 2)


def test_snapshots_differ_between_steps(tmp_path):
    run, _ = train(tiny(**SMALL), tmp_path)
    found = read_history(run.features_file)
    assert not torch.equal(found.points[0], found.points[1])
    assert not torch.equal(found.directions[0], found.directions[1])


@pytest.mark.parametrize("step", [2, 4])
def test_an_interrupted_run_writes_the_same_snapshots(tmp_path, step):
    """Interrupted before the first evaluation, and between two evaluations."""
    whole, _ = train(tiny(**SMALL), tmp_path / "whole")
    half, record = train(tiny(**SMALL), tmp_path / "parts", callback=InterruptsAt(step))
    assert record.status == "interrupted"
    assert not half.features_file.exists()
    parts, _ = train(tiny(**SMALL), tmp_path / "parts")
    assert parts.features_file.read_bytes() == whole.features_file.read_bytes()


def test_a_resumed_run_does_not_repeat_snapshots(tmp_path):
    """A kill after the evaluation at step 6 leaves the checkpoint of step 5."""

    class Killed(InterruptsAt):
        def on_evaluation(self, point):
            if point.step == 6:
                raise InterruptedError

    config = tiny(**SMALL, epochs=3)
    with pytest.raises(InterruptedError):
        train(config, tmp_path, Execution(device="cpu", checkpoint_every=5), Killed(0))
    run, _ = train(config, tmp_path)
    assert read_history(run.features_file).steps.tolist() == [3, 6, 9]


def test_snapshots_do_not_change_training(tmp_path):
    # The hashes differ, the weights do not.
    with_them, _ = train(tiny(**SMALL), tmp_path)
    without, _ = train(tiny(**SMALL | {"feature_snapshots": 0}), tmp_path)
    assert not without.features_file.exists()
    first, second = load_model(with_them)[0].state_dict(), load_model(without)[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_snapshots_use_at_most_all_test_images(tmp_path):
    run, record = train(tiny(**SMALL | {"feature_snapshots": 10**6}), tmp_path)
    assert read_history(run.features_file).points.shape[1] == record.data.test_images


@pytest.mark.parametrize("features", [None, 5])
def test_snapshots_require_2_or_3_features(features):
    with pytest.raises(ValueError, match=f"feature_snapshots=40 needs 2 or 3 features, not {features}"):
        tiny(**SMALL | {"features": features})


def test_snapshots_require_a_network_with_a_head(tmp_path):
    class Headless(torch.nn.Linear):
        def forward(self, images, labels):
            raise AssertionError("the network must not be called")

    with pytest.raises(ValueError, match="Headless has no head with features: omit feature_snapshots"):
        train(tiny(**SMALL), tmp_path, ON_CPU, model=Headless(8, 10))


def test_read_history_raises_an_error_for_other_files(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"x.safetensors' has no features: expected features.safetensors of a run"):
        read_history(tmp_path / "x.safetensors")


def test_snapshots_change_the_hash_only_if_enabled():
    config = tiny()
    assert config.hash == dataclasses.replace(config, feature_snapshots=0).hash
    assert tiny(**SMALL).hash != tiny(**SMALL | {"feature_snapshots": 0}).hash
