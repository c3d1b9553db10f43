"""Standard output that may be closed, full, cut off, or unable to show every character."""

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

from dcnet.files import sentence_of

FAILED, CUT_OFF = 1, 141


def prepare_streams() -> None:
    """Replaces streams that were closed at the start, as by `>&-`, and escapes characters that one cannot show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere(mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _nowhere(mode: str) -> TextIO:
    # It takes the number of the stream that is missing, which would otherwise be that of the next file.
    file: Any = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    os.set_inheritable(file.fileno(), True)
    return file


def discard(stream: TextIO) -> None:
    """From here on nothing arrives: Python would otherwise try to write the rest once more when it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Lasting(io.TextIOBase):
    """A stream for work that goes on though its output cannot be written: it says so once, and drops the rest.

    Args:
        stream: where it writes to.
        who: begins the sentence on stderr.
    """

    def __init__(self, stream: TextIO, who: str):
        self.stream, self.who = stream, who
        self.error: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self.stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        # Python flushes this stream when nothing refers to it any more; the other one may be closed by then.
        if self.error is None and not self.stream.closed:
            try:
                self.stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.error = error
        discard(self.stream)
        reason = "nobody reads it" if isinstance(error, BrokenPipeError) else sentence_of(error)
        with suppress(OSError):
            print(f"{self.who}: the output cannot be written: {reason}; the work goes on", file=sys.stderr, flush=True)

    @property
    def code(self) -> int:
        """The exit code of work whose output could not be written; 0 if all of it was."""
        return 0 if self.error is None else CUT_OFF if isinstance(self.error, BrokenPipeError) else FAILED


def lasting_console(who: str, stderr: bool = False, quiet: bool = False) -> tuple[Console, Lasting]:
    """A console for long work, and its stream, which knows whether everything could be written."""
    stream = Lasting(sys.stderr if stderr else sys.stdout, who)
    return Console(file=stream, quiet=quiet), stream  # type: ignore[arg-type]
