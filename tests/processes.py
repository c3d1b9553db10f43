"""Programs carried out by several processes together."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# Where their programs find what they share.
HERE = Path(__file__).parent
FOLDERS = (HERE,)
# Seconds that no process of a test takes, on a busy machine neither.
PATIENCE = 300.0


def wait_until(found, process=None, seconds=PATIENCE):
    """What `found` gives once it is anything, or the process has ended; an error where neither happens in time."""
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
    """By torchrun, as users start it."""
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
