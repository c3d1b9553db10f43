"""The examples run as they are run by a reader."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = EXAMPLES / "digits.py"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: tests run side by side.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def run_digits(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(DIGITS, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a demo of one epoch."""
    folder = tmp_path_factory.mktemp("digits") / "new"
    done = run_digits("--epochs", "1", "--seeds", "1", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_digits_writes_a_record_and_two_pictures_and_says_where(finished: tuple[Path, str]):
    folder, output = finished
    assert {path.name for path in folder.iterdir()} == {"record.json", "curves.png", "operators.png"}
    for path in folder.iterdir():
        assert str(path) in output


def test_digits_compares_the_operator_with_its_plain_twin(finished: tuple[Path, str]):
    record = json.loads((finished[0] / "record.json").read_text())
    assert list(record["results"]) == ["conv", "tanh-cos"] == record["config"]["operators"]
    assert record["results"]["tanh-cos"]["parameters"] > record["results"]["conv"]["parameters"]
    assert {"python", "torch", "dcnet"} <= set(record["environment"])


def test_digits_reports_the_last_epoch(finished: tuple[Path, str]):
    record = json.loads((finished[0] / "record.json").read_text())
    for run in record["runs"]:
        assert run["final"]["test_accuracy"] == run["curves"]["test_accuracy"][-1]
        assert record["results"][run["operator"]]["test_accuracy_mean"] == run["final"]["test_accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "tnh-cos"], "did you mean 'tanh'?"),
        (["--operator", "tanh-cos,tanh-cosine"], "unknown angle 'cosine'"),
        (["--epochs", "0"], "1 or more, not '0'"),
    ],
)
def test_digits_refuses_a_wrong_option_in_one_line(arguments: list[str], message: str, tmp_path: Path):
    done = run_digits(*arguments, "--out", str(tmp_path / "new"))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_digits_refuses_a_folder_it_cannot_write_to(tmp_path: Path):
    (tmp_path / "file").touch()
    done = run_digits("--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert done.stderr.startswith("digits.py: cannot write to the folder")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_digits_ends_quietly_when_interrupted(tmp_path: Path):
    command = [sys.executable, str(DIGITS), "--epochs", "1000", "--out", str(tmp_path / "new")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "new").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "digits: interrupted before the end\n"


def test_own_magnitude_is_checked_and_trains():
    done = run(EXAMPLES / "own_magnitude.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(line.split()[1]) for line in done.stdout.splitlines() if line.endswith("test images")]
    assert len(accuracies) == 2
    assert min(accuracies) > 90
