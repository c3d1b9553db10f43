"""Experiments of one's own, by any names and titles."""

from pathlib import Path

import pytest
from fake_records import small

from dcnet.cli.app import main
from dcnet.experiments import Cell, Experiment
from dcnet.experiments.experiment import experiments


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Away from the records of this repository, which would count."""
    monkeypatch.chdir(tmp_path)


def test_brackets_in_titles_notes_and_names_are_no_styles(capsys, monkeypatch):
    cells = (Cell("[/x] and more than the title has", "[red]", small()),)
    own = Experiment("own", "In [0, 1] of [/b] :100:", cells, notes=("A [bold]note[/].",))
    monkeypatch.setitem(experiments, "own", lambda: own)
    assert main(["reproduce", "own", "--status"]) == 0
    seen = capsys.readouterr().out
    assert all(text in seen for text in (own.title, own.notes[0], "[/x]", "[red]"))
