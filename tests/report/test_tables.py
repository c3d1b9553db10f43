"""The numbers of the README are those of the records."""

import json
from pathlib import Path

import pytest

from dcnet.report import tables

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("file", tables.FILES)
def test_files_hold_the_tables_of_the_records(file: str):
    text = (ROOT / file).read_text()
    assert tables.fill(text, ROOT / "results") == text


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_has_its_place(name: str):
    text = "".join((ROOT / file).read_text() for file in tables.FILES)
    assert text.count(f"<!-- {name} -->\n") == text.count(f"\n<!-- /{name} -->") == 1


def test_a_changed_record_changes_the_table(tmp_path: Path):
    for name in tables.TABLES:
        record = json.loads((ROOT / "results" / f"{name}.json").read_text())
        if name == "digits":
            record["results"]["conv"]["test_accuracy_mean"] = 12.34
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    filled = tables.fill("x\n<!-- digits -->\nold\n<!-- /digits -->\ny\n", tmp_path)
    assert "| `conv` | 45,354 | 12.34 ±" in filled
    assert "old" not in filled
    assert filled.startswith("x\n")
    assert filled.endswith("y\n")
