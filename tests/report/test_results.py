"""`make results`: what is stale is made anew and named, and what is not is left alone."""

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from dcnet.report import results

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file that has a table and one picture."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "README.md").write_text("a\n<!-- digits -->\nold\n<!-- /digits -->\nb\n")
    monkeypatch.setattr(results.tables, "FILES", ("README.md",))
    monkeypatch.setattr(results, "pictures", lambda: iter([("line.png", line(1.0))]))
    return tmp_path


def line(end: float) -> Figure:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1], [0, end])
    return figure


def test_what_is_stale_is_named_once_and_made_anew(place: Path, capsys: pytest.CaptureFixture[str]):
    assert results.main() == 1
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "README.md was stale and has been made anew",
        "docs/images/line.png was stale and has been made anew",
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
def test_marks_that_hold_no_table_are_told_and_nothing_is_written(place: Path, capsys, text: str, said: str):
    """A table whose end had been lost stayed as it was, without a word."""
    (place / "README.md").write_text(text)
    assert results.main() == 2
    assert said in capsys.readouterr().err
    assert (place / "README.md").read_text() == text


def test_in_a_folder_without_the_files_one_is_named(place: Path, capsys):
    (place / "README.md").unlink()
    assert results.main() == 2
    assert "README.md" in capsys.readouterr().err


def test_another_picture_is_stale_and_another_shade_is_not(place: Path, monkeypatch: pytest.MonkeyPatch):
    results.main()
    file = place / "docs/images/line.png"
    pixels = Image.open(file).convert("RGB")
    pixels.point(lambda value: max(0, value - 3)).save(file)
    assert results.main() == 0
    monkeypatch.setattr(results, "pictures", lambda: iter([("line.png", line(0.5))]))
    assert results.main() == 1


def test_pictures_of_other_sizes_are_not_the_same():
    contents = []
    for width in (3, 4):
        content = io.BytesIO()
        Image.new("RGB", (width, 3)).save(content, "PNG")
        contents.append(content.getvalue())
    assert results.same_picture(contents[0], contents[0])
    assert not results.same_picture(*contents)
