"""Run by each of two processes: `dcnet train`, with a Ctrl-C that reaches the second one alone, at step 5."""

import os
import signal
import sys

from dcnet.cli.app import start
from dcnet.training.trainer import Trainer

look = Trainer._look


def look_and_stop(self):
    if self.done == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
    return look(self)


Trainer._look = look_and_stop
sys.exit(start())
