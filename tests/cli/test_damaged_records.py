"""Damaged records: they are reported and omitted, and the others are shown."""

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcnet.cli.app import main
from dcnet.experiments import get_experiment
from dcnet.training import read_record
from dcnet.training.record import record_problem

Capture = pytest.CaptureFixture[str]
RESULTS = Path(__file__).parent.parent.parent / "results"
INVALID: list[Any] = [[], {}, None, "x", -1, 2**63, 1e99, True, [None], ["x"], {"a": []}, "\x1b[31m", "../../x"]
ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Changes to a folder outside of this repository, whose records would count."""
    monkeypatch.chdir(tmp_path)


def whole() -> dict[str, Any]:
    """A record with the evaluations of an attack, and short curves."""
    found = json.loads(next(iter(sorted((RESULTS / "attacks").glob("*tanh-cos-seed0*.json")))).read_text())
    found["curves"] = {name: values[:3] for name, values in found["curves"].items()}
    return found


def changed(each: int) -> Iterator[dict[str, Any]]:
    """Copies of the record in which one value is replaced by each invalid value, or removed."""
    original = whole()
    for at, path in enumerate(places(original)):
        for value in [*INVALID, *INVALID][at % len(INVALID) :][:each]:
            record: Any = copy.deepcopy(original)
            inside = record
            for name in path[:-1]:
                inside = inside[name]
            inside[path[-1]] = value
            yield record
        if isinstance(inside, dict):
            del inside[path[-1]]
            yield record


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of keys to each value; in a list, only to the first entry."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value if isinstance(value, list) else []))
    )
    for name, part in inside if isinstance(value, dict) else inside[:1]:
        yield (*before, name)
        if len(before) < 3:
            yield from places(part, (*before, name))


def put(root: Path, name: str, content: str) -> Path:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "record.json").write_text(content)
    return root / name / "record.json"


def outcome(capsys: Capture, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    seen = capsys.readouterr()
    assert "\x1b" not in seen.out + seen.err
    return code, seen.out, seen.err


def damaged_files(root: Path) -> list[str]:
    """One damaged run of each kind, and one intact run."""
    put(root, "whole", json.dumps(whole()))
    put(root, "deep", "[" * 100_000)
    put(
        root,
        "deep-inside",
        json.dumps(whole()).replace('"commit": ', '"more": ' + "[" * 500 + "]" * 500 + ', "commit": '),
    )
    put(root, "status", json.dumps(whole() | {"status": []}))
    put(root, "outside", json.dumps(whole() | {"name": "../../x"}))
    put(root, "half", json.dumps(whole() | {"commit": "\ud800"}))
    put(root, "digits", json.dumps(whole() | {"steps": 10**400}))
    put(root, "nothing", "")
    put(root, "bytes", "").write_bytes(b"\xff\xfe")
    put(root, "pipe", "").unlink()
    os.mkfifo(root / "pipe" / "record.json")
    put(root, "folder", "").unlink()
    (root / "folder" / "record.json").mkdir()
    return sorted(path.name for path in root.iterdir() if path.name != "whole")


def test_invalid_records_are_reported_and_the_others_listed(tmp_path: Path, capsys: Capture):
    runs = tmp_path / "runs"
    damaged = damaged_files(runs)
    code, out, err = outcome(capsys, "list", "runs", "--runs", runs)
    assert code == 0
    assert re.search(r"│ whole +│ done", out)
    for name in damaged:
        assert re.search(rf"│ {name} +│ unreadable", out)
        assert f"{str(runs / name / 'record.json')!r} is not a record of a run: " in err or name == "folder"
    assert err.count("\n") == len(damaged)
    code, out, _ = outcome(capsys, "report", "--runs", runs, "--out", tmp_path / "page.html")
    assert (code, out.partition(", from ")[2]) == (
        0,
        f"1 run, without unfinished runs: {', '.join(damaged)}\n",
    )
    code, out, _ = outcome(capsys, "report", "--records", runs, "--out", tmp_path / "page.html")
    assert code == 0
    assert all(str(runs / name / "record.json") in out for name in damaged if name != "folder")
    for name in damaged:
        code, out, err = outcome(capsys, "plot", "curves", runs / name, "--out", tmp_path / "curves.png")
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_collect_writes_only_to_its_folder(tmp_path: Path, capsys: Capture):
    config = get_experiment("table1").cells[0].config
    assert config is not None
    for name, given in (("a", "../../x"), ("b", "/tmp/x"), ("c", ".."), ("d", "x\0y"), ("e", "a\\b"), ("f", "")):
        record = whole() | {"config": config.described(), "name": given, "hash": config.hash}
        put(tmp_path / "runs", f"{config.name}-{config.hash}", json.dumps(record))
        put(tmp_path / "brought", name, json.dumps(record))
    before = sorted(path.name for path in tmp_path.iterdir())
    words = ("--status", "--runs", tmp_path / "runs", "--records", tmp_path / "brought", "--collect", "in/here")
    code, _, err = outcome(capsys, "reproduce", "table1", *words)
    assert code == 0
    assert err.count("which cannot be read: 'name' is ") == 6
    assert not list((tmp_path / "in" / "here").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "in"])


@pytest.mark.parametrize("each", [1, pytest.param(len(INVALID), marks=pytest.mark.slow)])
def test_record_with_an_invalid_value_is_shown_or_reported(tmp_path: Path, capsys: Capture, each: int):
    """All in one folder: an error in one record would fail the whole command."""
    kept, original = 0, whole()["hash"]
    for at, record in enumerate(changed(each)):
        if record_problem(record) is None:
            # Each as a separate run, unless the hash itself is invalid.
            own = {"hash": f"{at:08x}"} if record.get("hash") == original else {}
            put(tmp_path / "runs", f"run{at}", json.dumps(record | own))
            kept += 1
    assert 50 * min(each, 2) < kept < 2000
    put(tmp_path / "runs", "escape", json.dumps(whole() | {"status": ESCAPE}))
    for words in (
        ("list", "runs", "--runs", tmp_path / "runs"),
        ("list", "runs", "--json", "--runs", tmp_path / "runs"),
        ("report", "--runs", tmp_path / "runs", "--out", tmp_path / "page.html"),
        ("reproduce", "table7", "--status", "--records", tmp_path / "runs", "--runs", tmp_path / "none"),
    ):
        code, _, err = outcome(capsys, *words)
        assert (code, err) == (0, ""), err[-500:]


def test_all_records_of_this_repository_are_read():
    found = [path for path in RESULTS.rglob("*.json") if "curves" in json.loads(path.read_text())]
    assert len(found) > 100
    assert all(read_record(path).status in ("done", "diverged") for path in found)
