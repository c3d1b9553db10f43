"""One process a run, and no folder of a run that never began."""

import pytest

from dcnet.training.lock import locked


def test_two_cannot_hold_a_folder(tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is working on"),
        locked(tmp_path / "run"),
    ):
        pass


def test_a_folder_that_nothing_came_into_goes_away(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "run"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_a_folder_stays_and_so_does_one_that_was_there(tmp_path):
    (tmp_path / "before").mkdir()
    for name in ("before", "new"):
        with locked(tmp_path / name):
            if name == "new":
                (tmp_path / name / "record.json").write_text("{}")
    assert (tmp_path / "before").is_dir()
    assert (tmp_path / "new" / "record.json").read_text() == "{}"
