"""Program for each of two processes: `dcnet train`, then a line is printed if Python is finalized."""

import atexit
import sys

from dcnet.cli.app import start

atexit.register(print, "Python shuts down")
sys.exit(start())
