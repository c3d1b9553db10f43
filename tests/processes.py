"""Programs carried out by several processes together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

# Where their programs find what they share.
HERE = Path(__file__).parent
FOLDERS = (HERE, HERE / "training")


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def launch(processes, *command, fails=False):
    """By torchrun, as users start it."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    place = ["--master-addr=localhost", f"--master-port={free_port()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
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
