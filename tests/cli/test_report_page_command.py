"""`dcnet report`: a page of the given runs, and one-line errors."""

from pathlib import Path

import pytest
from helpers.cli_runs import call, complaint, root, trained

RESULTS = Path(__file__).parent.parent.parent / "results"
Capture = pytest.CaptureFixture[str]


def test_page_from_folders_of_records(tmp_path: Path, capsys: Capture):
    out = tmp_path / "new" / "page.html"
    assert call("report", "--records", RESULTS, "--out", out) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}, ")
    assert "cifar100-resnet32-tanh-cos-seed0" in out.read_text()


def test_page_of_one_run_and_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.chdir(tmp_path)
    conv, tanh = (trained()[operator].folder.name for operator in ("conv", "tanh-cos"))
    assert call("report", conv[-8:], "--runs", root()) == 0
    text = Path("report.html").read_text()
    assert conv in text
    assert tanh not in text
    assert call("report", "--runs", root(), "--out", "all.html") == 0
    text = Path("all.html").read_text()
    assert conv in text
    assert tanh in text
    assert capsys.readouterr().out.endswith("from 2 runs\n")


def test_page_without_runs_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DCNET_RUNS", raising=False)
    assert call("report") == 0
    assert "No records of" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the name of the run is ''"),
        (["nothing-of-that-name"], "there is no run 'nothing-of-that-name'"),
        (["--records", "no-such-folder"], "there is no folder 'no-such-folder'"),
        (
            ["--runs", "no-such-folder"],
            "--runs must be a folder that contains the folders of runs, not 'no-such-folder'",
        ),
        (["--out", "page.pdf"], "--out must be a file such as .html or .htm, not 'page.pdf'"),
        (["--out", "/proc/nothing/page.html"], "cannot write '/proc/nothing/page.html'"),
    ],
)
def test_wrong_input_gives_a_one_line_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(capsys, "report", *arguments)
    assert not list(tmp_path.iterdir())


def test_page_omits_a_damaged_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "broken.json").write_text("{")
    (tmp_path / "some" / "list.json").write_text("[1]")
    assert call("report", "--records", tmp_path / "some", "--out", tmp_path / "page.html") == 0
    assert "from 0 runs" in capsys.readouterr().out


def test_incomplete_record_gives_a_one_line_error(tmp_path: Path, capsys: Capture):
    (tmp_path / "half.json").write_text('{"kind": "features", "title": "half"}')
    message = complaint(capsys, "report", "--records", tmp_path, "--out", tmp_path / "page.html")
    assert "the section 'Features' cannot be drawn, since a record is damaged: KeyError" in message
    assert not (tmp_path / "page.html").exists()
