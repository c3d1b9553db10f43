"""The end of a process that has worked with others."""

import os
import sys
from typing import NoReturn


def end_process(code: int = 0) -> NoReturn:
    """End at once, with all that was printed, and without Python's own shutting down.

    torch's gloo keeps threads that live on while Python shuts down, after `destroy_process_group` too. One that lets
    go of the tensors of its last collective by then needs Python for it, and is made to exit within a destructor that
    must not be left: the process is aborted ("terminate called without an active exception"), and with it the others,
    when all was done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
