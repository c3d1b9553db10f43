"""What goes wrong in a run, or is wrong about one, is told in a sentence."""

import pytest
import torch
from helpers.small_runs import tiny, train, weights
from torch import nn

from dcnet.data import Dataset, Split
from dcnet.training import Callback, DivergenceError, Execution, Run, Trainer, find_run, load_model, read_record
from dcnet.training.trainer import find_bad_layer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tiny(), tmp_path_factory.mktemp("runs"))


class Explodes(nn.Module):
    """The output of one of its layers is infinite from some step on."""

    def __init__(self, after):
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(10, 10)
        self.after, self.calls = after, 0

    def forward(self, input):
        self.calls += self.training
        hidden = self.first(input.flatten(1))
        return self.second(hidden * (1e38 * 1e38 if self.calls > self.after else 1))


def test_a_loss_that_is_not_finite_stops_and_is_explained(tmp_path):
    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=2), model=Explodes(4))
    with pytest.raises(DivergenceError, match=r"the loss or a gradient of step 5 is not finite.*layer 'second'.*--lr"):
        trainer.run()
    assert run.record().status == "diverged"
    assert run.checkpoints.newest()[0].step == 4
    assert all(value.isfinite().all() for value in trainer.setup.model.state_dict().values())


class Overflows(nn.Module):
    """Gives its output as recurrent layers do, in a tuple, or computes something infinite beside its layer."""

    def __init__(self, in_tuple):
        super().__init__()
        self.layer, self.in_tuple = nn.Identity(), in_tuple

    def forward(self, input):
        huge = self.layer(input) * 1e38 * 1e38
        return (huge, None) if self.in_tuple else huge


@pytest.mark.parametrize("in_tuple", [True, False])
def test_a_layer_of_any_output_is_named(in_tuple):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Overflows(in_tuple), nn.Linear(4, 2)

        def forward(self, input):
            found = self.first(input)
            return self.second(found[0] if in_tuple else found)

    assert "output of the layer 'first' is the first" in find_bad_layer(Network(), torch.ones(2, 4))
    assert "output of the layer 'Overflows' is" in find_bad_layer(Overflows(in_tuple), torch.ones(2, 4))


def test_a_full_disk_is_told_before_anything_is_written_or_lost(tmp_path, monkeypatch):
    run, _ = train(tiny(), tmp_path)
    kept = weights(run)
    monkeypatch.setattr("dcnet.training.checkpoints.KEPT", 2**50)
    with pytest.raises(OSError, match="the checkpoints of this run need"):
        train(tiny(), tmp_path, again=True)
    assert (run.record().status, weights(run)) == ("done", kept)
    with pytest.raises(OSError, match="the checkpoints of this run need"):
        train(tiny(), tmp_path / "not" / "there")
    assert [path.name for path in tmp_path.iterdir()] == [run.folder.name]


class SteepAtZero(torch.autograd.Function):
    """Gives what it gets, and a gradient that is not a number."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path):
    class Steep(Explodes):
        def forward(self, input):
            self.calls += self.training
            hidden = self.first(input.flatten(1))
            return self.second(SteepAtZero.apply(hidden) if self.calls > self.after else hidden)

    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=1), model=Steep(3))
    with pytest.raises(
        DivergenceError,
        match=r"gradient of step 4 is not finite: all outputs are finite, but the gradient of 'first.weight'",
    ):
        trainer.run()
    assert run.checkpoints.newest()[0].step == 3
    assert all(value.isfinite().all() for value in trainer.setup.model.state_dict().values())


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = Explodes(100)
    with torch.no_grad():
        model.first.weight[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match=r"step 1 is not finite: the parameter 'first.weight'"):
        train(tiny(operator="conv"), tmp_path, model=model)


def test_a_folder_that_cannot_be_written_is_noticed_before_training(tmp_path):
    (tmp_path / "file").write_text("")

    class NeverCalled(Callback):
        def on_start(self, name, done, total):
            raise AssertionError("training began")

    with pytest.raises(OSError, match="file"):
        train(tiny(), tmp_path / "file", callback=NeverCalled())


def test_batches_larger_than_the_dataset(tmp_path):
    with pytest.raises(ValueError, match="must be from 1 to 60"):
        train(tiny(batch_size=61), tmp_path)


WHOLE = '"config": {}, "curves": {}, "status": "done"'
DAMAGED = [f'{{{WHOLE}, "{part}": 3}}' for part in ("data", "environment", "evaluations", "results", "timings")]
DAMAGED += [f'{{{WHOLE}, "results": {{"test_loss": {word}}}}}' for word in ("NaN", "Infinity", "-Infinity")]


@pytest.mark.parametrize("content", ["", "[]", '{"config": 1}', "{", *DAMAGED])
def test_files_that_are_no_records(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="is not a record of a run"):
        read_record(tmp_path)


def test_runs_are_found_by_name(finished, tmp_path):
    run, _ = finished
    root = run.folder.parent
    for text in (str(run.folder), str(run.record_file), run.folder.name, "digits-cnn9", run.folder.name[-8:]):
        assert find_run(text, root) == run
    train(tiny(seed=3), root)
    with pytest.raises(ValueError, match="may be any of 2 runs"):
        find_run("digits", root)
    with pytest.raises(ValueError, match="no run 'nothing'"):
        find_run("nothing", root)
    with pytest.raises(ValueError, match="no record at"):
        read_record(tmp_path)


def test_weights_of_another_network_are_refused(finished, tmp_path):
    run, _ = finished
    changed = run.record()
    changed.config["width"] = 0.2
    other = Run(tmp_path / "other")
    other.write(changed)
    other.model_file.write_bytes(weights(run))
    with pytest.raises(ValueError, match=r"in this network and .* in the file"):
        load_model(other)
    changed.config |= {"width": 0.1, "operator": "conv"}
    other.write(changed)
    with pytest.raises(ValueError, match="of another network"):
        load_model(other)


def test_steps_that_accelerate_would_accumulate_are_refused(tmp_path, monkeypatch):
    """It divides the gradients by their number, which nobody adds up here."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(ValueError, match=r"accumulate gradients over 8 steps, but a step is one batch here: unset"):
        train(tiny(), tmp_path)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    assert train(tiny(steps=1), tmp_path)[1].status == "done"


def test_one_class_is_nothing_to_learn(tmp_path):
    images = [Split(torch.zeros(60, 1, 8, 8, dtype=torch.uint8), torch.zeros(60, dtype=torch.int64))] * 2
    alone = Dataset("dogs", *images, ("dog",))
    with pytest.raises(ValueError, match=r"dogs has only one class, 'dog': expected two or more"):
        train(tiny(), tmp_path, dataset=alone)
    assert not list(tmp_path.iterdir())
