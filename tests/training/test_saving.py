"""What a run has written when it ends all of a sudden, and what its curves are means of."""

import time
from types import SimpleNamespace

import pytest
from small_runs import ON_CPU, Remembers, tiny, train, weights

from dcnet.training import Execution, Run, Watcher


class EndsAt(Watcher):
    """Ends the process as `kill -9` does: nothing is written any more."""

    def __init__(self, step):
        self.step = step

    def steps(self, done, loss, accuracy, images_per_second):
        if done == self.step:
            raise MemoryError


def ended_at(step, root, **execution):
    config = tiny(epochs=5)
    with pytest.raises(MemoryError):
        train(config, root, Execution(device="cpu", **execution), EndsAt(step))
    run = Run.of(config, root)
    return run, [file.name for file in run.checkpoints.files()]


def test_checkpoints_by_time_are_written_after_evaluations(tmp_path):
    """Three steps are an epoch, after which there is an evaluation."""
    run, found = ended_at(8, tmp_path, checkpoint_seconds=0)
    assert found == ["step-00000003.safetensors", "step-00000006.safetensors"]
    record = run.record()
    assert (record["status"], record["steps_done"], record["results"]) == ("running", 6, None)
    assert record["curves"]["step"] == [3, 6]
    again, record = train(tiny(epochs=5), tmp_path)
    assert record["resumed_at"] == [6]
    assert weights(again) == weights(train(tiny(epochs=5), tmp_path / "whole")[0])


def test_there_are_none_before_it_is_time(tmp_path):
    assert ended_at(8, tmp_path, checkpoint_seconds=3600)[1] == []


def test_the_time_is_counted_from_one_checkpoint_to_the_next(tmp_path, monkeypatch):
    now = iter(range(0, 10**6, 10))
    clocks = SimpleNamespace(monotonic=lambda: next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("dcnet.training.trainer.time", clocks)
    # Asked at the end of each epoch, and once more at each checkpoint: the third epoch ends 10 s after one.
    _, found = ended_at(14, tmp_path, checkpoint_seconds=20)
    assert found == ["step-00000006.safetensors", "step-00000012.safetensors"]


def test_curves_are_means_since_the_evaluation_before(tmp_path):
    each, both = Remembers(), Remembers()
    train(tiny(evaluate_every=1), tmp_path, ON_CPU, each)
    train(tiny(evaluate_every=3), tmp_path, ON_CPU, both)
    losses = [point["train_loss"] for point in each.points]
    expected = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [point["train_loss"] for point in both.points] == pytest.approx(expected, rel=1e-6)
