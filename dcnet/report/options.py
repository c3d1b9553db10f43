"""Command-line options that more than one command takes; what is wrong with them is said in one line."""

import argparse
from collections.abc import Callable
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


def at_least(limit: int) -> Callable[[str], int]:
    """A reader of whole numbers from the limit on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be a whole number, {limit} or more, not {text!r}")
        return int(text)

    return read


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
