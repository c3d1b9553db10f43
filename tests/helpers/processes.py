"""Tests with several processes: launching them, and waiting for them."""

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dcnet.interrupts import end_process

# Programs import `helpers` from here.
TESTS = Path(__file__).parents[1]
# More seconds than a process of a test needs, even on a busy machine.
PATIENCE = 300.0


def wait_until(found, process=None, seconds=PATIENCE):
    """The value of `found` once it is true, or when the process has ended; fails after some seconds."""
    end = time.monotonic() + seconds
    while not (value := found()) and (process is None or process.poll() is None):
        assert time.monotonic() < end, f"nothing happened in {seconds:g} s"
        time.sleep(0.01)
    return value


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def program_environment():
    """The environment of programs that import `helpers`."""
    found = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)}


def launch(processes, *command, fails=False, options=()):
    """Runs a program with torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *options]
    place = ["--master-addr=localhost", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*start, *place, *map(str, command)],
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done


def results_of(work, folder, processes):
    """Runs `work(rank, folder)` in several processes. Returns what each of them saved as `<rank>.pt`."""
    context = torch.multiprocessing.spawn(work, (str(folder),), processes, join=False)
    end = time.monotonic() + PATIENCE
    try:
        # `join` also returns False when one of them has ended.
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@contextlib.contextmanager
def process_group(rank, folder, processes):
    """Joins the group of all processes, and ends the process afterwards."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    rendezvous = {"init_method": f"file://{folder}/rendezvous", "timeout": timeout}
    dist.init_process_group("gloo", rank=rank, world_size=processes, **rendezvous)
    yield
    dist.barrier()
    dist.destroy_process_group()
    end_process()
