"""Helpers for tests that start processes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# Folders that the started programs import from.
HERE = Path(__file__).parent
FOLDERS = (HERE,)
# Seconds; even on a busy machine the processes of tests take less.
PATIENCE = 300.0


def wait_until(found, process=None, seconds=PATIENCE):
    """Waits until `found()` is true or the process ends, and returns its value; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := found()) and (process is None or process.poll() is None):
        assert time.monotonic() < end, f"nothing happened in {seconds:g} s"
        time.sleep(0.01)
    return value


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def launch(processes, *command, fails=False):
    """Runs a command in several processes by torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    place = ["--master-addr=localhost", f"--master-port={free_port()}"]
    found = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)}
    done = subprocess.run(
        [*start, *place, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done
