"""Runs in separate processes: killed, interrupted, out of disk space, locked, and how they report failures."""

import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
from helpers.processes import PATIENCE, free_port, wait_until
from helpers.small_runs import tiny, train
from PIL import Image

from dcnet.training import Execution, Run, RunConfig, Trainer
from dcnet.training.processes import agree, is_lost_connection, process_group_options, reports
from dcnet.training.runs import run_lock

STEPS = 60


def dcnet_train(root, *arguments, **options):
    """Starts `dcnet train` in a process."""
    small = ["--train-images", "60", "--batch-size", "20", "--width", "0.1", "--steps", str(STEPS)]
    command = [sys.executable, "-m", "dcnet", "train", *small, "--device", "cpu", "--runs", str(root), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process, code=0):
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, (process.returncode, out, err)
    return out, err


def the_run(root):
    return Run.of(tiny(steps=STEPS), root)


def wait_for_checkpoint(run, process, before=()):
    """Waits until the run has written a checkpoint."""
    wait_until(lambda: run.checkpoints.files() != [*before], process)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run, _ = train(tiny(steps=STEPS), tmp_path_factory.mktemp("whole"))
    return run.model_file.read_bytes()


@pytest.mark.slow
def test_a_run_killed_at_random_times_ends_with_the_same_bits(uninterrupted, tmp_path):
    """During a step, during a write, or before the first checkpoint."""
    run, chance = the_run(tmp_path), random.Random()
    for _ in range(3):
        before = run.checkpoints.files()
        process = dcnet_train(tmp_path, "--checkpoint-every", "1")
        wait_for_checkpoint(run, process, before)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate(timeout=PATIENCE)
        assert run.record().status in ("running", "done")
    finish(dcnet_train(tmp_path, "--resume", str(run.folder)))
    assert run.record().status == "done"
    assert run.model_file.read_bytes() == uninterrupted


def test_a_killed_and_interrupted_run_ends_with_the_same_bits(uninterrupted, tmp_path):
    run = the_run(tmp_path)
    process = dcnet_train(tmp_path, "--checkpoint-every", "1")
    wait_for_checkpoint(run, process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert run.record().status == "running"
    before = run.checkpoints.files()
    process = dcnet_train(tmp_path, "--checkpoint-every", "1")
    wait_for_checkpoint(run, process, before)
    process.send_signal(signal.SIGINT)
    out, _ = finish(process, code=130)
    record = run.record()
    assert record.status == "interrupted"
    assert f"stopped after {record.steps_done} of {STEPS} steps" in out
    words = out[out.index("dcnet train --resume") :].split("\n")[0].split()
    assert words[2] == "--resume"
    resumed, _ = train(tiny(steps=STEPS), tmp_path)
    assert resumed.record().resumed_at[-1] == record.steps_done
    assert run.model_file.read_bytes() == uninterrupted


def limit_files():
    """Makes larger writes fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.slow
def test_a_failed_write_is_reported_and_loses_nothing(tmp_path):
    """The limit is above the size of the weights, and below that of a checkpoint with the optimizer state."""
    _, err = finish(dcnet_train(tmp_path, "--checkpoint-every", "5", preexec_fn=limit_files), code=1)
    assert "Traceback" not in err
    assert "File too large" in err
    run = the_run(tmp_path)
    assert run.record().status == "running"
    assert not run.checkpoints.files()
    assert not list((run.folder / "checkpoints").glob(".*"))
    assert train(tiny(steps=STEPS), tmp_path)[1].status == "done"


def test_a_locked_run_is_an_error_for_other_processes(tmp_path):
    with run_lock(the_run(tmp_path).folder):
        _, err = finish(dcnet_train(tmp_path), code=2)
    assert "another process is using" in err


@pytest.fixture
def photos(tmp_path):
    """A folder of small images of two classes."""
    chance = numpy.random.default_rng(0)
    for part, name in itertools.product(("train", "val"), ("cat", "dog")):
        folder = tmp_path / "data" / part / name
        folder.mkdir(parents=True)
        for k in range(8):
            Image.fromarray(chance.integers(0, 255, (40, 50, 3), dtype=numpy.uint8)).save(folder / f"{k}.png")
    return tmp_path / "data"


PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def test_a_signal_to_the_whole_process_group_does_not_kill_the_workers(photos, tmp_path):
    """`timeout` and cluster schedulers send such signals."""
    small = "--image-size 16 --batch-size 4 --width 0.1 --steps 2000 --device cpu --workers 1 --checkpoint-every 1"
    command = [sys.executable, "-m", "dcnet", "train", "--dataset", "imagefolder", *small.split()]
    command += ["--data-dir", str(photos), "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, **PIPED)
    wait_until(lambda: list((tmp_path / "runs").glob("*/checkpoints/step-*")), process)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = finish(process, code=130)
    assert "resume with: dcnet train --resume" in out


# The iterator, and with it the workers, lives until Python exits.
RAISES = """
import sys
from pathlib import Path
from dcnet.data import load_dataset

batches = iter(load_dataset("imagefolder", Path(sys.argv[1])).train_loader(4, size=16, workers=1))
next(batches)
raise RuntimeError("a step that fails")
"""


def test_a_process_with_workers_exits_after_an_exception(photos):
    process = subprocess.Popen([sys.executable, "-c", RAISES, str(photos)], **PIPED)
    _, err = finish(process, code=1)
    assert err.endswith("RuntimeError: a step that fails\n")


class Refuses(torch.nn.Linear):
    """A network that raises in its second pass, when workers are reading ahead."""

    def forward(self, images):
        if hasattr(self, "seen"):
            raise RuntimeError("expected another size")
        self.seen = True
        return super().forward(images.mean((2, 3)))


def test_workers_stop_after_an_exception(photos, tmp_path):
    config = RunConfig(dataset="imagefolder", operator="conv", image_size=16, batch_size=4, steps=3)
    execution = Execution(device="cpu", workers=1, data_dir=photos)
    trainer = Trainer(config, Run.of(config, tmp_path), execution, model=Refuses(3, 2))
    with pytest.raises(RuntimeError, match="expected another size"):
        trainer.run()
    assert not multiprocessing.active_children()


def test_one_process_agrees_with_itself():
    assert agree(lambda: 3) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        agree(lambda: int("x"))


def test_errors_of_lost_connections_are_recognized():
    assert is_lost_connection(
        RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    )
    assert is_lost_connection(torch.distributed.DistBackendError("NCCL communicator was aborted"))
    assert not is_lost_connection(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


def test_the_first_process_that_fails_reports_it(monkeypatch):
    """In each attempt and each run; always if there is no store."""
    port = free_port()
    store = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    names = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert [reports("run", OSError()) for _ in range(3)] == [True, False, False]
    assert reports("another run", OSError())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [reports("run", OSError()) for _ in range(2)] == [True, False]
    del store
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert [reports("run", OSError()) for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("restarts", "shared", "machines", "expected"),
    [("1", "True", "1", 1), ("0", "True", "1", 0), ("1", "False", "1", 0), ("1", "True", "2", 0)],
)
def test_restarted_processes_of_one_machine_use_new_names(monkeypatch, restarts, shared, machines, expected):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    assert len(process_group_options()) == expected
