"""Program for each of several processes: `dcnet train`; at its first step 5, the last process is killed."""

import os
import signal
import sys
from pathlib import Path

from dcnet.cli.app import start
from dcnet.training.trainer import Trainer

read_meter = Trainer._read_meter


def read_and_die(self):
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if self.done == 5 and is_last:
        # A second attempt finds the file. Launchers count attempts differently.
        killed = Path(sys.argv[-1]).with_name("killed")
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return read_meter(self)


Trainer._read_meter = read_and_die
sys.exit(start())
