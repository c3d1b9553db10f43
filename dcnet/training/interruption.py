"""Ctrl-C that lets the step be finished."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody asked to stop; who asks twice does not want to wait."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Inside, the first SIGINT or SIGTERM only sets a flag. Threads other than the main one get none.

    A signal that is switched off, as `nohup` and shells do for jobs in the background, stays so.
    """
    asked = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # None is a handler that is not of Python, which could not be put back.
    heard = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, asked._ask)
    try:
        yield asked
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
