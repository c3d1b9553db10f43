"""Options of the command line."""

import argparse

import pytest

from dcnet.report.options import Parser, at_least, operators


def test_operators_are_split_at_commas_outside_of_parentheses():
    specs = ["conv", "seg(slope=0.2,radius=Radius(init=2.0,decay=0.9))-cos", "tanh-linear+joint"]
    assert operators(",".join(specs)) == specs


@pytest.mark.parametrize(
    "text", ["tnh-cos", "", "tanh-cos,", "tanh(-cos", "tanh(radius=-1.0)-cos", "tanh(radius=True)-cos"]
)
def test_wrong_operators_are_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        operators(text)


def test_at_least_reads_whole_numbers():
    assert at_least(2)("2") == 2
    for text in ("1", "-3", "2.5", "", "two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"2 or more, not {text!r}"):
            at_least(2)(text)


def test_the_parser_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]):
    parser = Parser(prog="command")
    parser.add_argument("--operator", type=operators)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--operator", "tnh-cos"])
    error = capsys.readouterr().err
    assert error.startswith("command: argument --operator: unknown magnitude 'tnh'")
    assert error.count("\n") == 1
