"""Two processes give what one gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import tiny, train

from dcnet.training import Run

SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.25", "--steps", "12", "--norm", "none"]
TRICKS = ["--projection-every", "4", "--orthonormal", "1e-3", "--weight-decay", "1e-3"]


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def launch(processes, *command, code=0):
    """By torchrun, as users start it."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    place = ["--master-addr=localhost", f"--master-port={free_port()}"]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    done = subprocess.run(
        [*start, *place, *command], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode == 0) == (code == 0), done.stderr[-3000:]
    return done


def the_config():
    return tiny(steps=12, width=0.25, norm="none", projection_every=4, orthonormal=1e-3, weight_decay=1e-3)


COMMAND = ["train", *SMALL, *TRICKS, "--device", "cpu"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    launch(2, "-m", "dcnet", *COMMAND, "--runs", str(root))
    assert len(list(root.iterdir())) == 1
    return Run.of(the_config(), root)


def test_two_processes_have_the_loss_curve_of_one_with_the_joint_batch(two_processes, tmp_path):
    """But for the order of sums: after 12 steps in float32 the losses are seen to agree to 1e-7, and must to 1e-5.

    An image may stand so near to two classes that rounding decides: accuracies may differ by one.
    """
    _, one = train(the_config(), tmp_path)
    two = two_processes.record()
    assert (one["execution"]["processes"], two["execution"]["processes"]) == (1, 2)
    for part in ("train", "test"):
        assert one["curves"][f"{part}_loss"] == pytest.approx(two["curves"][f"{part}_loss"], rel=1e-5)
        image = 100.001 / one["data"][f"{part}_images"]
        assert one["curves"][f"{part}_accuracy"] == pytest.approx(two["curves"][f"{part}_accuracy"], abs=image)


def test_two_processes_go_on_where_two_were_stopped(two_processes, tmp_path):
    """One of them is told to stop, and both do."""
    launch(2, str(Path(__file__).with_name("stopping.py")), *COMMAND, "--runs", str(tmp_path), code=1)
    run = Run.of(the_config(), tmp_path)
    assert (run.record()["status"], run.record()["steps_done"]) == ("interrupted", 5)
    launch(2, "-m", "dcnet", *COMMAND, "--runs", str(tmp_path))
    assert run.model_file.read_bytes() == two_processes.model_file.read_bytes()
    expected, found = two_processes.record()["curves"], run.record()["curves"]
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        # Sums of an epoch that was interrupted are added up in another order.
        assert found[name] == pytest.approx(expected[name], rel=1e-12)


def test_each_process_ends_before_python_shuts_down(tmp_path):
    """With torch's threads still there, one was aborted now and then, and with it the whole run."""
    done = launch(2, str(Path(__file__).with_name("ending.py")), *COMMAND, "--runs", str(tmp_path))
    assert "wrote" in done.stdout
    assert "Python shuts down" not in done.stdout


def test_weights_and_moments_that_are_shared_out():
    assert launch(2, str(Path(__file__).with_name("shards.py"))).stdout.count("equal") == 2


def test_batches_that_cannot_be_shared(tmp_path):
    done = launch(2, "-m", "dcnet", "train", "--batch-size", "21", "--device", "cpu", "--runs", str(tmp_path), code=1)
    assert "cannot be shared by 2 processes" in done.stderr
