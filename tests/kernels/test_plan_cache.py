"""Choices on disk: damaged files, other versions, folders without write access, and concurrent writers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcnet.kernels import plan_cache
from dcnet.kernels.plan_cache import cache_folder, remember, remembered

KEY, CHOICE = "fprop N2 C3 4x5", {"engine": 3, "knobs": {"TILE": 2}, "us": [1.5, 2.0]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DCNET_CACHE", str(tmp_path))
    return tmp_path / "plans"


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_choice_is_remembered(folder):
    assert remembered(KEY) is None
    remember(KEY, CHOICE)
    assert remembered(KEY) == CHOICE
    assert remembered(KEY + "0") is None


def test_a_newer_choice_replaces_the_older_one(folder):
    remember(KEY, CHOICE)
    remember(KEY, {"engine": None})
    assert remembered(KEY) == {"engine": None}
    only_file(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b'"text"', b"{}", b"[" * 5000, b'{"version": 1e999}', b"\0" * 100],
    ids=["empty", "cut", "not utf-8", "list", "null", "number", "text", "object", "deep", "huge number", "zeros"],
)
def test_damaged_files_are_ignored_and_replaced(folder, content):
    remember(KEY, CHOICE)
    only_file(folder).write_bytes(content)
    assert remembered(KEY) is None
    remember(KEY, CHOICE)
    assert remembered(KEY) == CHOICE


def test_every_truncation_is_ignored(folder):
    remember(KEY, CHOICE)
    path = only_file(folder)
    content = path.read_bytes().rstrip()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert remembered(KEY) is None


@pytest.mark.parametrize(("field", "value"), [("version", 0), ("version", "1"), ("key", "another"), ("key", None)])
def test_files_of_other_versions_and_keys_are_ignored(folder, field, value):
    remember(KEY, CHOICE)
    path = only_file(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert remembered(KEY) is None


def test_a_path_that_cannot_be_a_folder_is_ignored(folder):
    folder.write_text("a file in the place of the folder")
    remember(KEY, CHOICE)
    assert remembered(KEY) is None


def test_a_folder_in_the_place_of_the_file_is_ignored(folder):
    plan_cache._path_of(KEY).mkdir(parents=True)
    remember(KEY, CHOICE)
    assert remembered(KEY) is None


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_ignored(folder):
    folder.mkdir()
    folder.chmod(0o500)
    remember(KEY, CHOICE)
    assert remembered(KEY) is None


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(28, "full"), OSError(30, "read-only")])
def test_errors_of_the_disk_are_ignored(folder, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(plan_cache, "write_json", fail)
    remember(KEY, CHOICE)
    assert remembered(KEY) is None


def test_the_folder_is_in_the_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("DCNET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "dcnet" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "dcnet" / "plans"


def test_without_a_home_nothing_is_remembered(monkeypatch):
    def fail(self):
        raise RuntimeError

    monkeypatch.delenv("DCNET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", fail)
    remember(KEY, CHOICE)
    assert remembered(KEY) is None


WRITER = """
import sys
from dcnet.kernels.plan_cache import remember, remembered
for i in range(40):
    remember("shared", {"by": sys.argv[1], "filler": "x" * 4096})
    found = remembered("shared")
    assert found is not None and len(found["filler"]) == 4096
    remember(f"own {sys.argv[1]} {i}", i)
"""


def test_concurrent_writers_lose_nothing(folder):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(i)]) for i in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert remembered("shared")["by"] in ("0", "1", "2")
    assert [remembered(f"own {w} {i}") for w in range(3) for i in range(40)] == [*range(40)] * 3
    assert [path.name for path in folder.iterdir() if path.suffix != ".json"] == []
