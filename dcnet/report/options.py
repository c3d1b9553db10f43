"""Command-line options that more than one command takes; what is wrong with them is said in one line."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dcnet.operator import PLAIN, Operator, is_plain


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong option with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def operators(text: str) -> list[str]:
    """The checked specs of a list such as `tanh-cos,seg(slope=0.2,scale=2.0)-cos`."""
    try:
        return [PLAIN if is_plain(spec) else str(Operator.parse(spec)) for spec in _split(text)]
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def one_operator(text: str) -> str:
    """A checked spec."""
    (spec,) = operators(text) if len(_split(text)) == 1 else [""]
    if not spec:
        raise argparse.ArgumentTypeError(f"expected one operator, not {text!r}")
    return spec


def at_least(limit: int) -> Callable[[str], int]:
    """A reader of whole numbers from the limit on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be a whole number, {limit} or more, not {text!r}")
        return int(text)

    return read


def above_zero(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def writable(text: str) -> Path:
    """A file that can be written: better known before the work is done than after."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder")
    return path


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the program with the exit code of `main`, and an interruption or a missing package with one line."""
    try:
        code = main()
    except ImportError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).stem}: interrupted before the end", file=sys.stderr)
        code = 130
    sys.exit(code)


def _split(text: str) -> list[str]:
    """Splits at the commas that stand outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
