"""Run by each of two processes: `dcnet train`, which prints a line if Python is finalized after it."""

import atexit
import sys

from dcnet.cli.app import start

atexit.register(print, "Python shuts down")
sys.exit(start())
