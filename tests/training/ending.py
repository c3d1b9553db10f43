"""Run by each of two processes: `dcnet train`, and a word if Python shuts down after it."""

import atexit
import sys

from dcnet.cli.app import start

atexit.register(print, "Python shuts down")
sys.exit(start())
