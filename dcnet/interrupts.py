"""Handling of Ctrl-C and SIGTERM, while the command still imports torch and during long work.

The package imports this module first, so that Ctrl-C leaves no traceback; later `dcnet.cli.app` handles it."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from dcnet.exit_codes import BAD_INPUT, INTERRUPTED

MESSAGE = "dcnet: interrupted before the end"
STDERR = 2


def runs_the_command() -> bool:
    """Whether this process is `dcnet` or `python -m dcnet`, and not a worker or a program that imports the package."""
    started, given = sys.orig_argv, len(sys.argv)
    return given < len(started) and os.path.basename(started[-given]).removesuffix(".exe") == "dcnet"


def end_quietly(number: int, frame: Any) -> None:
    """Exits at once; an exception would be raised inside an import."""
    os.write(STDERR, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def check_folder() -> None:
    """Exits if the current folder was removed, since the import of torch would fail."""
    try:
        os.getcwd()
    except OSError as error:
        os.write(STDERR, f"dcnet: the current folder is gone ({error.strerror}): change to another one\n".encode())
        os._exit(BAD_INPUT)


def prepare() -> None:
    """Handles Ctrl-C until the command does; an ignored SIGINT, as in background jobs, stays ignored."""
    if not runs_the_command():
        return
    check_folder()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)


def leave_to_the_command() -> None:
    """Makes Ctrl-C a KeyboardInterrupt again, which the command handles."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


prepare()


def end_process(code: int = 0) -> NoReturn:
    """Flushes the output and exits without the finalization of Python.

    Threads of gloo survive `destroy_process_group`. One that releases tensors during finalization needs the GIL, is
    made to exit inside a destructor, and aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Records whether a signal requested a stop; a second signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """A context in which the first SIGINT or SIGTERM only sets a flag, in the main thread.

    An ignored signal, as with `nohup` or in background jobs, stays ignored.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # None means a handler installed by C code, which could not be restored.
    handled = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, interruption._request)
    try:
        yield interruption
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
