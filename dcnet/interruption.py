"""What may happen before `dcnet` has begun: torch takes a second or two to import, and Ctrl-C would leave a traceback.

The package imports this first of all. `dcnet.cli.app` takes over as soon as it is there.
"""

import os
import signal
import sys
from typing import Any

USAGE, INTERRUPTED, MESSAGE = 2, 130, "dcnet: interrupted before the end"
STDERR = 2


def runs_the_command() -> bool:
    """Whether this process is `dcnet` or `python -m dcnet`, not a program that uses the library.

    By the words that Python itself was started with, which processes that a command starts do not have.
    """
    started, given = sys.orig_argv, len(sys.argv)
    return given < len(started) and os.path.basename(started[-given]).removesuffix(".exe") == "dcnet"


def end_quietly(number: int, frame: Any) -> None:
    """At once, since nothing has begun that would need an end; an exception would go through the imports of others."""
    os.write(STDERR, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def check_folder() -> None:
    """Ends the command where the current folder was removed: torch would end it while it is imported, in odd words."""
    try:
        os.getcwd()
    except OSError as error:
        os.write(STDERR, f"dcnet: the current folder is gone ({error.strerror}): change to another one\n".encode())
        os._exit(USAGE)


def prepare() -> None:
    """Until the command is there; Ctrl-C that somebody has switched off, as for jobs in the background, stays so."""
    if not runs_the_command():
        return
    check_folder()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)


def leave_to_the_command() -> None:
    """From here on Ctrl-C is an exception, which the command can handle."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


prepare()
