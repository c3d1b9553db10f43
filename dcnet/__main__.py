"""`python -m dcnet` is `dcnet`."""

import sys

from dcnet.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
