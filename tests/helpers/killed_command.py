"""Program for each of several processes: `dcnet train`; at step 5 of the first attempt, the last process is killed."""

import os
import signal
import sys

from dcnet.cli.app import start
from dcnet.training.trainer import Trainer

read_meter = Trainer._read_meter


def read_and_die(self):
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if self.done == 5 and is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return read_meter(self)


Trainer._read_meter = read_and_die
sys.exit(start())
