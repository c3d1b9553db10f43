"""Training with two processes: the same losses, resuming, exit, sharded state."""

from pathlib import Path

import pytest
import torch
from helpers.processes import launch
from helpers.small_runs import tiny, train

from dcnet.data import load_dataset
from dcnet.training import Run
from dcnet.training.sources import make_source

HELPERS = Path(__file__).parents[1] / "helpers"
SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.25", "--steps", "12", "--norm", "none"]
TRICKS = ["--projection-every", "4", "--orthonormal", "1e-3", "--weight-decay", "1e-3"]


def the_config():
    return tiny(steps=12, width=0.25, norm="none", projection_every=4, orthonormal=1e-3, weight_decay=1e-3)


COMMAND = ["train", *SMALL, *TRICKS, "--device", "cpu"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The run, and the output of its processes."""
    root = tmp_path_factory.mktemp("two")
    done = launch(2, HELPERS / "exiting_command.py", *COMMAND, "--runs", root)
    assert len(list(root.iterdir())) == 1
    return Run.of(the_config(), root), done.stdout


def test_two_processes_have_the_loss_curve_of_one_process(two_processes, tmp_path):
    """Sums are computed in another order: losses after 12 steps in float32 agree to about 1e-7; the test requires 1e-5.

    After so few steps, rounding decides the class of some images: accuracies may differ by two images.
    """
    _, one = train(the_config(), tmp_path)
    two = two_processes[0].record()
    assert (one.execution["processes"], two.execution["processes"]) == (1, 2)
    for part in ("train", "test"):
        losses, accuracies = (
            [record.curves.get(f"{part}_{name}") for record in (one, two)] for name in ("loss", "accuracy")
        )
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert accuracies[0] == pytest.approx(accuracies[1], abs=200.001 / one.data.get(f"{part}_images"))


@pytest.mark.slow
def test_two_processes_resume_to_the_same_bits(two_processes, tmp_path):
    """One process gets the signal, and both stop."""
    whole, _ = two_processes
    launch(2, HELPERS / "stopping_command.py", *COMMAND, "--runs", tmp_path, fails=True)
    run = Run.of(the_config(), tmp_path)
    assert (run.record().status, run.record().steps_done) == ("interrupted", 5)
    launch(2, "-m", "dcnet", *COMMAND, "--runs", tmp_path)
    assert run.model_file.read_bytes() == whole.model_file.read_bytes()
    expected, found = whole.record().curves, run.record().curves
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        # The sums of an interrupted epoch are added up in another order.
        assert found.get(name) == pytest.approx(expected.get(name), rel=1e-12)


def test_each_process_exits_without_finalization(two_processes):
    """In the finalization of Python, threads of torch sometimes abort the process."""
    assert "wrote" in two_processes[1]
    assert "Python shuts down" not in two_processes[1]


def test_sharded_weights_and_moments_are_gathered_and_restored():
    assert launch(2, HELPERS / "sharded_state.py").stdout.count("equal") == 2


def test_batch_size_must_be_a_multiple_of_the_number_of_processes():
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes, 2"):
        make_source(load_dataset("digits"), tiny(batch_size=21), torch.device("cpu"), (0, 2), False, 0)
