"""Interrupted benchmarks, and records that cannot be written."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import PATIENCE, wait_until
from helpers.tiny_bench import bench

from dcnet.bench.layer_costs import LayerBenchmark


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The measured operators; the measurement of the second one is interrupted."""
    reached: list[str] = []
    right = LayerBenchmark._measure_group

    def measure(self, shape, operator, steps):
        reached.append(operator)
        if len(reached) == 2:
            raise KeyboardInterrupt
        return right(self, shape, operator, steps)

    monkeypatch.setattr(LayerBenchmark, "_measure_group", measure)
    return reached


OPERATORS = ("--operators", "tanh-cos", "sphere-cos", "linear-cos")


def test_an_interruption_writes_the_results_so_far(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "record.json"
    assert bench("layers", *OPERATORS, "--json", str(file)) == 130
    assert interrupted == ["tanh-cos", "sphere-cos"]
    record = json.loads(file.read_text())
    assert record["complete"] is False
    assert {row["operator"] for row in record["results"]} == {"tanh-cos"}
    assert record["means"]
    error = capsys.readouterr().err
    expected = f"interrupted: 3 results were measured and are in {file}\n"
    assert error == f"dcnet bench layers: {expected}"


def test_an_interruption_without_a_file_reports_lost_results(
    interrupted: list[str], capsys: pytest.CaptureFixture[str]
):
    assert bench("layers", *OPERATORS) == 130
    assert capsys.readouterr().err.endswith("3 results were measured and are lost without --json\n")


def test_an_interruption_before_the_first_result_keeps_the_old_record(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "record.json"
    file.write_text("old")
    interrupted.append("before")
    assert bench("layers", *OPERATORS, "--json", str(file)) == 130
    assert file.read_text() == "old"
    assert capsys.readouterr().err.endswith("nothing was measured\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_ctrl_c_interrupts_the_command(tmp_path: Path):
    file = tmp_path / "record.json"
    command = [sys.executable, "-m", "dcnet", "bench", "layers", "--device", "cpu", "--threads", "1"]
    command += ["--variants", "eager", "--warmup", "0", "--repeats", "2", "--json", str(file)]
    # More shapes than can be timed before the signal arrives.
    shapes = [f"N1xC2x4x{width}" for width in range(4, 2000)]
    process = subprocess.Popen(
        [*command, "--shapes", *shapes], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert wait_until(file.exists, process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.startswith("dcnet bench layers: interrupted: ")
    assert json.loads(file.read_text())["complete"] is False


def test_an_unwritable_record_is_rejected_before_measuring(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    assert bench("layers", "--json", str(tmp_path / "file" / "record.json")) == 2
    assert bench("layers", "--json", str(tmp_path)) == 2
    assert interrupted == []
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"dcnet: cannot write '{tmp_path}/file/record.json': ")
    assert second == f"dcnet: cannot write '{tmp_path}': it is a folder"
