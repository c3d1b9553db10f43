"""Options of the command line."""

import argparse
from pathlib import Path

import pytest

from dcnet.cli.options import Parser, one_operator, operators, run_program, whole_number, writable


def test_operators_are_split_at_commas_outside_of_parentheses():
    specs = ["conv", "seg(slope=0.2,radius=Radius(init=2.0,decay=0.9))-cos", "tanh-linear+joint"]
    assert operators(",".join(specs)) == specs


@pytest.mark.parametrize(
    "text", ["tnh-cos", "", "tanh-cos,", "tanh(-cos", "tanh(radius=-1.0)-cos", "tanh(radius=True)-cos"]
)
def test_wrong_operators_are_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        operators(text)


def test_whole_number_reads_whole_numbers():
    assert whole_number(2)("2") == 2
    for text in ("1", "-3", "2.5", "", "two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"2 or more, not {text!r}"):
            whole_number(2)(text)


def test_the_parser_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]):
    parser = Parser(prog="command")
    parser.add_argument("--operator", type=operators)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--operator", "tnh-cos"])
    error = capsys.readouterr().err
    assert error.startswith("command: argument --operator: unknown magnitude 'tnh'")
    assert error.count("\n") == 1


def test_files_are_checked_before_the_work(tmp_path: Path):
    assert writable(str(tmp_path / "new" / "file.json")) == tmp_path / "new" / "file.json"
    with pytest.raises(argparse.ArgumentTypeError, match="it is a folder"):
        writable(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot write"):
        writable(str(tmp_path / "file" / "below.json"))
    assert one_operator("tanh(scale=2.0,radius=1.0)-cos") == "tanh(scale=2.0,radius=1.0)-cos"
    with pytest.raises(argparse.ArgumentTypeError, match="expected one operator"):
        one_operator("tanh-cos,ball-cos")


def test_an_interruption_ends_in_one_line(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_program(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted before the end\n")
