"""Two processes give what one gives."""

from pathlib import Path

import pytest
from processes import launch
from small_runs import tiny, train

from dcnet.training import Run

HERE = Path(__file__).parent
SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.25", "--steps", "12", "--norm", "none"]
TRICKS = ["--projection-every", "4", "--orthonormal", "1e-3", "--weight-decay", "1e-3"]


def the_config():
    return tiny(steps=12, width=0.25, norm="none", projection_every=4, orthonormal=1e-3, weight_decay=1e-3)


COMMAND = ["train", *SMALL, *TRICKS, "--device", "cpu"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    launch(2, "-m", "dcnet", *COMMAND, "--runs", root)
    assert len(list(root.iterdir())) == 1
    return Run.of(the_config(), root)


def test_two_processes_have_the_loss_curve_of_one_with_the_joint_batch(two_processes, tmp_path):
    """But for the order of sums: after 12 steps in float32 the losses are seen to agree to 1e-7, and must to 1e-5.

    After so few steps some images stand so near to two classes that rounding decides: accuracies may differ by two.
    """
    _, one = train(the_config(), tmp_path)
    two = two_processes.record()
    assert (one["execution"]["processes"], two["execution"]["processes"]) == (1, 2)
    for part in ("train", "test"):
        assert one["curves"][f"{part}_loss"] == pytest.approx(two["curves"][f"{part}_loss"], rel=1e-5)
        images = 200.001 / one["data"][f"{part}_images"]
        assert one["curves"][f"{part}_accuracy"] == pytest.approx(two["curves"][f"{part}_accuracy"], abs=images)


def test_two_processes_go_on_where_two_were_stopped(two_processes, tmp_path):
    """One of them is told to stop, and both do."""
    launch(2, HERE / "stopping.py", *COMMAND, "--runs", tmp_path, fails=True)
    run = Run.of(the_config(), tmp_path)
    assert (run.record()["status"], run.record()["steps_done"]) == ("interrupted", 5)
    launch(2, "-m", "dcnet", *COMMAND, "--runs", tmp_path)
    assert run.model_file.read_bytes() == two_processes.model_file.read_bytes()
    expected, found = two_processes.record()["curves"], run.record()["curves"]
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        # Sums of an epoch that was interrupted are added up in another order.
        assert found[name] == pytest.approx(expected[name], rel=1e-12)


def test_each_process_ends_before_python_shuts_down(tmp_path):
    """With torch's threads still there, one was aborted now and then, and with it the whole run."""
    done = launch(2, HERE / "ending.py", *COMMAND, "--runs", tmp_path)
    assert "wrote" in done.stdout
    assert "Python shuts down" not in done.stdout


def test_weights_and_moments_that_are_shared_out():
    assert launch(2, HERE / "shards.py").stdout.count("equal") == 2


def test_batches_that_cannot_be_shared(tmp_path):
    command = ["train", "--batch-size", "21", "--device", "cpu", "--runs", tmp_path]
    done = launch(2, "-m", "dcnet", *command, fails=True)
    assert "cannot be shared by 2 processes" in done.stderr
