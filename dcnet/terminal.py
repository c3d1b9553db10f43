"""Terminal output: streams that may be closed or full, consoles, and escaped text."""

import io
import json
import os
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

from dcnet.exit_codes import FAILED, OUTPUT_CLOSED
from dcnet.files import sentence_of

# Width of output to files and pipes: wide enough for the names of runs.
WIDTH_ELSEWHERE = 160


def prepare_streams() -> None:
    """Replaces standard streams that are closed, as by `>&-`; makes the others escape characters they cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _null_stream(mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _null_stream(mode: str) -> TextIO:
    # It gets the descriptor of the closed stream, which otherwise the next opened file would get.
    file: Any = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    os.set_inheritable(file.fileno(), True)
    return file


def discard(stream: TextIO) -> None:
    """Redirects a stream to the null device: Python would otherwise write the buffered rest at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class ResilientStream:
    """An output stream that survives write errors: it reports the first one on stderr, and drops the rest.

    Args:
        stream: the output.
        who: the start of the message on stderr.
    """

    def __init__(self, stream: TextIO, who: str):
        self.stream, self.who = stream, who
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self.stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        # The stream may be closed when it is flushed at exit.
        if self.error is None and not self.stream.closed:
            try:
                self.stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.error = error
        discard(self.stream)
        reason = "the reader has gone" if isinstance(error, BrokenPipeError) else sentence_of(error)
        with suppress(OSError):
            print(
                f"{self.who}: the output cannot be written: {reason}; the work continues", file=sys.stderr, flush=True
            )

    @property
    def code(self) -> int:
        """The exit code: 0 if all output was written."""
        return 0 if self.error is None else OUTPUT_CLOSED if isinstance(self.error, BrokenPipeError) else FAILED


def resilient_console(who: str, stderr: bool = False, quiet: bool = False) -> tuple[Console, ResilientStream]:
    """A console for long work that survives write errors, and its stream, which has the exit code."""
    stream = ResilientStream(sys.stderr if stderr else sys.stdout, who)
    return Console(file=stream, quiet=quiet), stream  # type: ignore[arg-type]


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or `WIDTH_ELSEWHERE` for files and pipes."""
    known = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH_ELSEWHERE, stderr=stderr)


def print_line(console: Console, text: str) -> None:
    """Prints a line without markup, since paths may have brackets."""
    console.print(visible(text), soft_wrap=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """Prints indented JSON; control characters, and those that the output cannot encode, are escaped."""
    plain = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=plain)
    print("".join(char if char == "\n" or char.isprintable() else json.dumps(char)[1:-1] for char in text))


# Unicode categories: control characters, invisible and bidirectional ones, surrogates, and line separators.
CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: object, kept: str = "") -> str:
    r"""The text with characters that control a terminal escaped, such as \x1b, except those in `kept`."""
    return "".join(char if char in kept or _plain(char) else _escaped(char) for char in str(text))


def _plain(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) not in CONTROLS


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")
