"""`python -m dcnet` is `dcnet`."""

import sys

from dcnet.cli.app import start

if __name__ == "__main__":
    sys.exit(start())
