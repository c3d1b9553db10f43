"""The default runs of `dcnet report` are those of `dcnet list runs`."""

from pathlib import Path

import pytest
from helpers.page_records import a_run, put

from dcnet.cli.app import main

Capture = pytest.CaptureFixture[str]


def test_page_omits_the_runs_of_smoke_tests(tmp_path: Path, capsys: Capture):
    put(tmp_path / "runs" / "whole", "record", a_run(hash="11111111"))
    put(tmp_path / "runs" / "smoke" / "small", "record", a_run(hash="22222222"))
    out = tmp_path / "page.html"
    assert main(["report", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith("from 1 run\n")
    assert "11111111" in out.read_text()
    assert "22222222" not in out.read_text()
    assert main(["report", "--records", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith("from 2 runs\n")


def test_report_names_unfinished_runs(tmp_path: Path, capsys: Capture):
    put(tmp_path / "whole", "record", a_run())
    put(tmp_path / "started", "record", a_run(status="interrupted", hash="22222222"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "record.json").write_text("{")
    words = ["--runs", str(tmp_path), "--out", str(tmp_path / "page.html")]
    assert main(["report", "started", *words]) == 2
    assert "the run 'started' has no results of a finished training" in capsys.readouterr().err
    assert main(["report", *words]) == 0
    assert capsys.readouterr().out.endswith("from 1 run, without unfinished runs: cut, started\n")


def test_truncated_records_are_reported(tmp_path: Path, capsys: Capture):
    put(tmp_path / "brought", "whole", a_run())
    cut = tmp_path / "brought" / "cut.json"
    cut.write_text("{")
    assert main(["report", "--records", str(tmp_path / "brought"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.endswith(f"from 1 run, without unreadable files: {cut}\n")


def test_folder_without_runs_gives_an_empty_page(tmp_path: Path, capsys: Capture):
    (tmp_path / "runs").mkdir()
    out = tmp_path / "page.html"
    assert main(["report", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "No records of" in out.read_text()
