"""Ctrl-C that lets the step be finished."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
    """Inside, the first SIGINT or SIGTERM only sets a flag. Threads other than the main one get none."""
    asked = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: dict[signal.Signals, Any] = {number: signal.signal(number, asked._ask) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
