"""`make results`: stale files are updated and reported, others stay unchanged."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.speed_records import blocks
from matplotlib.figure import Figure
from PIL import Image

from dcnet.experiments import experiments, get_experiment
from dcnet.report import results

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file that has a table and one picture."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "README.md").write_text("a\n<!-- digits -->\nold\n<!-- /digits -->\nb\n")
    monkeypatch.setattr(results, "FILES", ("README.md",))
    monkeypatch.setattr(results.listing, "store_operators", lambda: False)
    monkeypatch.setattr(results, "pictures", lambda: iter([("line.png", line(1.0))]))
    return tmp_path


def line(end: float) -> Figure:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1], [0, end])
    return figure


def test_stale_files_are_reported_and_updated(place: Path, capsys: pytest.CaptureFixture[str]):
    assert results.main() == 1
    message = capsys.readouterr().err
    assert message.splitlines() == [
        "README.md was stale and has been updated",
        "docs/images/line.png was stale and has been updated",
    ]
    assert "| `conv` |" in (place / "README.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in (place / "README.md", place / "docs/images/line.png")}
    assert results.main() == 0
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- digits -->\nold\n", "README.md: the mark <!-- digits --> has no <!-- /digits --> after it"),
        ("<!-- /digits -->\n", "README.md: the mark <!-- /digits --> has no <!-- digits --> before it"),
        ("<!-- digits -->\n<!-- fair -->\n<!-- /fair -->\n<!-- /digits -->\n", "<!-- digits --> has no"),
        ("<!-- digits -->\nold\n<!-- digits -->\n<!-- /digits -->\n", "<!-- digits --> has no"),
        ("<!-- digit -->\n<!-- /digit -->\n", "unknown table in a mark 'digit'"),
    ],
)
def test_wrong_marks_are_reported_and_nothing_is_written(place: Path, capsys, text: str, said: str):
    """A table without an end mark must not stay stale silently."""
    (place / "README.md").write_text(text)
    assert results.main() == 2
    assert said in capsys.readouterr().err
    assert (place / "README.md").read_text() == text


def test_missing_file_is_reported_by_name(place: Path, capsys):
    (place / "README.md").unlink()
    assert results.main() == 2
    assert "README.md" in capsys.readouterr().err


def test_picture_is_stale_if_it_differs_by_more_than_a_shade(place: Path, monkeypatch: pytest.MonkeyPatch):
    results.main()
    file = place / "docs/images/line.png"
    pixels = Image.open(file).convert("RGB")
    pixels.point(lambda value: max(0, value - 3)).save(file)
    assert results.main() == 0
    monkeypatch.setattr(results, "pictures", lambda: iter([("line.png", line(0.5))]))
    assert results.main() == 1


def test_pictures_of_different_sizes_differ():
    contents = []
    for width in (3, 4):
        content = io.BytesIO()
        Image.new("RGB", (width, 3)).save(content, "PNG")
        contents.append(content.getvalue())
    assert results.same_picture(contents[0], contents[0])
    assert not results.same_picture(*contents)


@pytest.mark.parametrize("file", results.FILES)
def test_files_have_the_tables_of_the_records(file: str):
    text = (ROOT / file).read_text()
    assert results.fill(text, ROOT / "results") == text


def test_every_page_with_a_table_is_in_files():
    names = {*results.TABLES, *experiments}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = {page for page in pages for name in re.findall(r"<!-- (\w+) -->\n", page.read_text()) if name in names}
    assert {str(page.relative_to(ROOT)) for page in marked} <= set(results.FILES)


@pytest.mark.parametrize("name", results.TABLES)
def test_every_record_has_its_table_and_every_table_its_record(name: str):
    text = "".join((ROOT / file).read_text() for file in results.FILES)
    there = (ROOT / "results" / f"{name}.json").exists() or (ROOT / "results" / name).is_dir()
    marks = text.count(f"<!-- {name} -->\n")
    assert marks == text.count(f"\n<!-- /{name} -->")
    # A table without a record must be empty.
    assert (marks > 0) == there or f"<!-- {name} -->\n<!-- /{name} -->\n" in text


def test_a_changed_record_changes_the_table(tmp_path: Path):
    (tmp_path / "digits").mkdir()
    for file in (ROOT / "results" / "digits").iterdir():
        record: dict[str, Any] = json.loads(file.read_text())
        if record["config"]["operator"] == "conv":
            record["results"]["test_accuracy"] = 12.34
        (tmp_path / "digits" / file.name).write_text(json.dumps(record))
    filled = results.fill("x\n<!-- digits -->\nold\n<!-- /digits -->\ny\n", tmp_path)
    assert re.search(r"\| `conv` \| [\d,]+ \| 12.34 ± 0.00 \|", filled)
    assert "old" not in filled
    assert filled.startswith("x\n")
    assert filled.endswith("y\n")


def test_experiment_uses_all_available_seeds(tmp_path: Path):
    (tmp_path / "brought").mkdir()
    (cell,) = [cell for cell in get_experiment("table3").cells if (cell.row, cell.column) == ("seg", "sqcos, no ReLU")]
    for config, error in zip(cell.configs(2), (24.0, 26.0), strict=True):
        record = {"name": config.name, "hash": config.hash, "status": "done", "results": {"test_error": error}}
        (tmp_path / "brought" / f"{config.hash}.json").write_text(json.dumps(record | {"config": {}, "curves": {}}))
    filled = results.fill("<!-- table3 -->\nold\n<!-- /table3 -->\n", tmp_path)
    assert "| 25.00 ± 1.41 (24.29, +0.71) |" in filled
    assert "| sphere | missing (33.31) |" in filled
    assert "old" not in filled


def test_rows_without_runs_and_paper_are_named_below_the_table():
    text = results.fill("<!-- faces -->\nold\n<!-- /faces -->\n", ROOT / "results")
    rows = get_experiment("faces").rows
    shown = [row for row in rows if f"| {row} |" in text]
    below = text.partition("Without a run so far: ")[2].partition(".\n")[0]
    assert [row for row in rows if row not in shown] == (below.split("; ") if below else [])
    assert "softmax, conv" in shown
    assert "missing" not in text


def test_table_without_a_record_is_unchanged(tmp_path: Path):
    assert results.fill("text\n", tmp_path) == "text\n"


def test_table_of_blocks_is_filled_once_there_is_a_record(tmp_path: Path):
    marks = "<!-- blocks_cuda -->\n<!-- /blocks_cuda -->\n"
    assert results.fill(marks, tmp_path) == marks
    (tmp_path / "blocks_cuda.json").write_text(json.dumps({**blocks(), "complete": True}))
    assert "| `tanh-cos` | dcnet, fused | 2.25 (x 1.12) |" in results.fill(marks, tmp_path)


def test_record_of_an_interrupted_run_is_rejected(tmp_path: Path):
    (tmp_path / "layers_cpu.json").write_text(json.dumps({"benchmark": "layers", "complete": False}))
    with pytest.raises(ValueError, match=r"layers_cpu.json' is the record of an unfinished run"):
        results.fill("", tmp_path)
    (tmp_path / "layers_cpu.json").unlink()
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "x.json").write_text(json.dumps({"status": "interrupted"}))
    with pytest.raises(ValueError, match=r"x.json' is the record of an unfinished run"):
        results.fill("", tmp_path)
