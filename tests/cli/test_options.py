"""Options that commands and examples share."""

import argparse
from pathlib import Path

import pytest

from dcnet.cli.options import Parser, one_operator, run_program, whole_number, writable


@pytest.mark.parametrize(
    "spec", ["conv", "seg(slope=0.2,radius=Radius(init=2.0,decay=0.9))-cos", "tanh(scale=2.0,radius=1.0)-cos"]
)
def test_one_operator_returns_the_normalized_spec(spec: str):
    assert one_operator(spec) == spec


@pytest.mark.parametrize(
    "text",
    ["tnh-cos", "", "tanh-cos,", "tanh-cos,ball-cos", "tanh(-cos", "tanh(radius=-1.0)-cos", "tanh(radius=True)-cos"],
)
def test_one_operator_rejects_invalid_specs(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        one_operator(text)


def test_whole_number_reads_whole_numbers():
    assert whole_number(2)("2") == 2
    for text in ("1", "-3", "2.5", "", "two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"2 or more, not {text!r}"):
            whole_number(2)(text)


def test_parser_reports_a_wrong_option_in_one_line(capsys: pytest.CaptureFixture[str]):
    parser = Parser(prog="command")
    parser.add_argument("--operator", type=one_operator)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--operator", "tnh-cos"])
    error = capsys.readouterr().err
    assert error.startswith("command: argument --operator: unknown magnitude 'tnh'")
    assert error.count("\n") == 1


def test_writable_creates_the_folder_and_rejects_folders(tmp_path: Path):
    assert writable(str(tmp_path / "new" / "file.json")) == tmp_path / "new" / "file.json"
    with pytest.raises(argparse.ArgumentTypeError, match="it is a folder"):
        writable(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot write"):
        writable(str(tmp_path / "file" / "below.json"))


def test_run_program_reports_an_interruption_in_one_line(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_program(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted before the end\n")
