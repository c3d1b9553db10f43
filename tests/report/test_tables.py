"""The numbers of the README are those of the records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dcnet.experiments import chosen, experiments
from dcnet.report import tables

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("file", tables.FILES)
def test_files_hold_the_tables_of_the_records(file: str):
    text = (ROOT / file).read_text()
    assert tables.fill(text, ROOT / "results") == text


def test_every_page_that_has_a_table_is_kept_up_to_date():
    names = {*tables.TABLES, *experiments}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = {page for page in pages for name in re.findall(r"<!-- (\w+) -->\n", page.read_text()) if name in names}
    assert {str(page.relative_to(ROOT)) for page in marked} <= set(tables.FILES)


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_record_has_its_table_and_every_table_its_record(name: str):
    text = "".join((ROOT / file).read_text() for file in tables.FILES)
    there = (ROOT / "results" / f"{name}.json").exists() or (ROOT / "results" / name).is_dir()
    marks = text.count(f"<!-- {name} -->\n")
    assert marks == text.count(f"\n<!-- /{name} -->")
    assert (marks > 0) == there


def test_a_changed_record_changes_the_table(tmp_path: Path):
    (tmp_path / "digits").mkdir()
    for file in (ROOT / "results" / "digits").iterdir():
        record: dict[str, Any] = json.loads(file.read_text())
        if record["config"]["operator"] == "conv":
            record["results"]["test_accuracy"] = 12.34
        (tmp_path / "digits" / file.name).write_text(json.dumps(record))
    filled = tables.fill("x\n<!-- digits -->\nold\n<!-- /digits -->\ny\n", tmp_path)
    assert re.search(r"\| `conv` \| [\d,]+ \| 12.34 ± 0.00 \|", filled)
    assert "old" not in filled
    assert filled.startswith("x\n")
    assert filled.endswith("y\n")


def test_an_experiment_has_all_seeds_that_there_are(tmp_path: Path):
    (tmp_path / "brought").mkdir()
    (cell,) = [cell for cell in chosen(["table3"])[0].cells if (cell.row, cell.column) == ("seg", "sqcos, no ReLU")]
    for config, error in zip(cell.configs(2), (24.0, 26.0), strict=True):
        record = {"name": config.name, "hash": config.hash, "status": "done", "results": {"test_error": error}}
        (tmp_path / "brought" / f"{config.hash}.json").write_text(json.dumps(record | {"config": {}, "curves": {}}))
    filled = tables.fill("<!-- table3 -->\nold\n<!-- /table3 -->\n", tmp_path)
    assert "| 25.00 ± 1.41 (24.29, +0.71) |" in filled
    assert "| sphere | missing (33.31) |" in filled
    assert "old" not in filled


def test_a_table_without_a_record_is_left_out(tmp_path: Path):
    assert tables.fill("text\n", tmp_path) == "text\n"


def test_the_record_of_an_interrupted_run_is_no_record(tmp_path: Path):
    (tmp_path / "layers_cpu.json").write_text(json.dumps({"benchmark": "layers", "complete": False}))
    with pytest.raises(ValueError, match=r"layers_cpu.json' is the record of a run that was interrupted"):
        tables.fill("", tmp_path)
    (tmp_path / "layers_cpu.json").unlink()
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "x.json").write_text(json.dumps({"status": "interrupted"}))
    with pytest.raises(ValueError, match=r"x.json' is the record of a run that was interrupted"):
        tables.fill("", tmp_path)
