"""Output that is closed, full or not UTF-8, a user without a home folder, and a deleted current folder."""

import io
import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from dcnet.cli.app import main
from dcnet.data.load import data_folder
from dcnet.terminal import ResilientStream
from dcnet.training.runs import all_runs, runs_root

SMALL = ["train", "--train-images", "60", "--batch-size", "20", "--width", "0.1", "--steps", "4", "--device", "cpu"]


@contextmanager
def written_to(kind: str) -> Iterator[None]:
    """A context in which standard output cannot be written."""
    if kind == "full":
        stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w", encoding="utf-8")
    # Closing it raises if buffered text could not be written.
    with stream, redirect_stdout(stream):
        yield


BROKEN = pytest.mark.parametrize("kind", ["full", "cut off"])


@BROKEN
def test_training_continues_if_the_output_cannot_be_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with written_to(kind):
        assert main([*SMALL, "--runs", str(tmp_path)]) == (1 if kind == "full" else 141)
    (run,) = all_runs(tmp_path)
    assert run.record().status == "done"
    reason = "No space left on device" if kind == "full" else "the reader has gone"
    message = f"dcnet train: the output cannot be written: {reason}; the work continues\n"
    assert capsys.readouterr().err == message


@BROKEN
@pytest.mark.parametrize("words", [["list", "margins"], ["--version"], ["train", "--help"]])
def test_other_commands_report_unwritable_output_in_one_line(
    kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    with written_to(kind):
        code = main(words)
    err = capsys.readouterr().err
    if kind == "full":
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("dcnet: ")
        assert err.endswith("No space left on device\n")
    else:
        assert (code, err) == (141, "")


def test_closed_stream_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    for words in (["list", "margins"], ["list", "margins", "--json"], [*SMALL, "--runs", str(tmp_path)]):
        assert main(words) == 0
    sys.stdout.close()
    assert all_runs(tmp_path)[0].done


def test_characters_that_a_stream_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch):
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    assert main(["list", "operators"]) == 0
    print("\N{MINUS SIGN}")
    assert main(["list", "operators", "--json"]) == 0
    shown, _, listed = content.getvalue().partition(rb"\u2212")
    assert shown
    assert json.loads(listed)


def test_files_are_utf8_whatever_the_locale(tmp_path: Path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "dcnet", "report", "--out", "page.html"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | locale, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "‖" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_deleted_current_folder_gives_a_one_line_error(tmp_path: Path):
    script = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m dcnet list margins"
    paths = str(Path(__file__).parents[2])
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    expected = "dcnet: the current folder is gone (No such file or directory): change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def unknown_user(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    for name in ("HOME", "XDG_CACHE_HOME", "DCNET_DATA", "DCNET_RUNS"):
        monkeypatch.delenv(name, raising=False)
    assert data_folder().parent == Path(tempfile.gettempdir())
    assert runs_root() == Path("runs")
    monkeypatch.setenv("DCNET_DATA", "~/data")
    assert main(["list", "datasets"]) == 2
    assert "'~/data' needs a home folder, but there is none: set HOME" in capsys.readouterr().err


def test_flush_after_the_output_is_closed():
    below = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = ResilientStream(below, "dcnet")
    stream.write("done\n")
    below.close()
    stream.flush()
    assert stream.code == 0
