"""Figures are written atomically."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dcnet.report.drawing import save
from dcnet.report.operator_plots import operator_curves


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("A.PNG", b"\x89PNG")])
def test_save_writes_the_format_of_the_suffix_into_a_new_folder(name: str, start: bytes, tmp_path: Path):
    path = tmp_path / "new" / "folder" / name
    save(Figure(), path)
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


def test_save_is_deterministic_for_svg(tmp_path: Path):
    for name in ("a.svg", "b.svg"):
        save(operator_curves(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_save_rejects_an_unknown_suffix(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.png or \.svg, not '\.xyz'"):
        save(Figure(), tmp_path / "a.xyz")
    assert not list(tmp_path.iterdir())


def test_failed_save_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(Figure(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
