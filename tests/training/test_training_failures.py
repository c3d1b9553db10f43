"""Errors of training: values that are not finite, full disks, unusable data."""

import pytest
import torch
from helpers.small_runs import tiny, train, weights
from torch import nn

from dcnet.data import Dataset, Split
from dcnet.training import Callback, DivergenceError, Execution, Run, Trainer
from dcnet.training.step import find_bad_layer


class Explodes(nn.Module):
    """A network whose output is infinite after some steps."""

    def __init__(self, after):
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(10, 10)
        self.after, self.calls = after, 0

    def forward(self, input):
        self.calls += self.training
        hidden = self.first(input.flatten(1))
        return self.second(hidden * (1e38 * 1e38 if self.calls > self.after else 1))


def test_a_loss_that_is_not_finite_names_the_step_and_layer(tmp_path):
    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=2), model=Explodes(4))
    with pytest.raises(DivergenceError, match=r"the loss or a gradient of step 5 is not finite.*layer 'second'.*--lr"):
        trainer.run()
    assert run.record().status == "diverged"
    assert run.checkpoints.newest()[0].step == 4
    assert all(value.isfinite().all() for value in trainer.setup.model.state_dict().values())


class Overflows(nn.Module):
    """A module with an infinite output, optionally in a tuple as in recurrent layers."""

    def __init__(self, in_tuple):
        super().__init__()
        self.layer, self.in_tuple = nn.Identity(), in_tuple

    def forward(self, input):
        huge = self.layer(input) * 1e38 * 1e38
        return (huge, None) if self.in_tuple else huge


@pytest.mark.parametrize("in_tuple", [True, False])
def test_find_bad_layer_names_layers_with_any_kind_of_output(in_tuple):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Overflows(in_tuple), nn.Linear(4, 2)

        def forward(self, input):
            found = self.first(input)
            return self.second(found[0] if in_tuple else found)

    assert "output of the layer 'first' is the first" in find_bad_layer(Network(), torch.ones(2, 4))
    assert "output of the layer 'Overflows' is" in find_bad_layer(Overflows(in_tuple), torch.ones(2, 4))


@pytest.mark.parametrize("called", [False, True])
def test_find_bad_layer_names_a_layer_of_a_compiled_network(called):
    """A hook for all modules at once would fail in torch.compile."""
    network, x = torch.compile(nn.Sequential(nn.Linear(4, 4), Overflows(False)), backend="eager"), torch.ones(2, 4)
    if called:
        network(x)
    assert "output of the layer '_orig_mod" in find_bad_layer(network, x)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    run, _ = train(tiny(), tmp_path)
    kept = weights(run)
    monkeypatch.setattr("dcnet.training.checkpoints.KEPT", 2**50)
    with pytest.raises(OSError, match="the checkpoints of this run need"):
        train(tiny(), tmp_path, again=True)
    assert (run.record().status, weights(run)) == ("done", kept)
    with pytest.raises(OSError, match="the checkpoints of this run need"):
        train(tiny(), tmp_path / "not" / "there")
    assert [path.name for path in tmp_path.iterdir()] == [run.folder.name]


class NanGradient(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

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
            return self.second(NanGradient.apply(hidden) if self.calls > self.after else hidden)

    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=1), model=Steep(3))
    with pytest.raises(
        DivergenceError,
        match=r"gradient of step 4 is not finite: all outputs are finite, but the gradient of 'first.weight'",
    ):
        trainer.run()
    assert run.checkpoints.newest()[0].step == 3
    assert all(value.isfinite().all() for value in trainer.setup.model.state_dict().values())


def test_weights_that_are_not_finite_name_the_parameter(tmp_path):
    model = Explodes(100)
    with torch.no_grad():
        model.first.weight[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match=r"step 1 is not finite: the parameter 'first.weight'"):
        train(tiny(operator="conv"), tmp_path, model=model)


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")

    class NeverCalled(Callback):
        def on_start(self, name, done, total):
            raise AssertionError("training started")

    with pytest.raises(OSError, match="file"):
        train(tiny(), tmp_path / "file", callback=NeverCalled())


def test_a_batch_larger_than_the_dataset_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match="must be from 1 to 60"):
        train(tiny(batch_size=61), tmp_path)


def test_gradient_accumulation_of_accelerate_raises_an_error(tmp_path, monkeypatch):
    """Each batch is a step here, but accelerate would still divide the gradient."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(ValueError, match=r"accumulate gradients over 8 steps, which is not supported: unset"):
        train(tiny(), tmp_path)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    assert train(tiny(steps=1), tmp_path)[1].status == "done"


def test_a_dataset_of_one_class_raises_an_error(tmp_path):
    images = [Split(torch.zeros(60, 1, 8, 8, dtype=torch.uint8), torch.zeros(60, dtype=torch.int64))] * 2
    alone = Dataset("dogs", *images, ("dog",))
    with pytest.raises(ValueError, match=r"dogs has only one class, 'dog': expected two or more"):
        train(tiny(), tmp_path, dataset=alone)
    assert not list(tmp_path.iterdir())
