"""Custom experiments, with any names and titles."""

from pathlib import Path

import pytest
from helpers.fake_records import small

from dcnet.cli.app import main
from dcnet.experiments import Cell, Experiment, status_of
from dcnet.experiments.experiment import experiments, register
from dcnet.experiments.status import RecordIndex
from dcnet.report.experiment_tables import experiment_table


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Changes to a folder outside of this repository, whose records would be used."""
    monkeypatch.chdir(tmp_path)


def test_brackets_are_not_markup(capsys, monkeypatch):
    cells = (Cell("[/x] and more than the title has", "[red]", small()),)
    own = Experiment("own", "In [0, 1] of [/b] :100:", cells, notes=("A [bold]note[/].",))
    monkeypatch.setitem(experiments, "own", lambda: own)
    assert main(["reproduce", "own", "--status"]) == 0
    seen = capsys.readouterr().out
    assert all(text in seen for text in (own.title, own.notes[0], "[/x]", "[red]"))


def table(columns=("error",), **about):
    return Experiment("own", "own", tuple(Cell(row, column, small()) for row in "ab" for column in columns), **about)


@pytest.mark.parametrize(
    ("columns", "about", "said"),
    [
        (("error", "error"), {}, "two cells in the row 'a' and the column 'error'"),
        (("easy", "hard"), {"contest": True}, "a contest, but its row 'a' has several cells: give one cell per row"),
        (("error",), {"seeds": 0}, "seeds=0: give 1 or more"),
    ],
)
def test_invalid_experiments(columns, about, said):
    with pytest.raises(ValueError, match=said):
        table(columns, **about)


def test_columns_and_rows_have_their_order():
    assert table(("easy", "hard")).columns == ["easy", "hard"]
    assert table(contest=True).rows == ["a", "b"]


def test_experiment_and_function_have_one_name(capsys, monkeypatch):
    monkeypatch.setitem(experiments, "copy", table)
    assert main(["reproduce", "copy", "--status"]) == 2
    assert "the function copy returns the experiment 'own': give both the same name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["all", "figure_of_merit"])
def test_reserved_names_are_rejected(name):
    def make() -> Experiment:
        return table()

    make.__name__ = name
    with pytest.raises(ValueError, match=f"'{name}' is a reserved name"):
        register(make)


def test_bars_are_escaped_in_markdown(tmp_path):
    own = Experiment("own", "own", (Cell("|x|", "a|b", small(), 7.0),))
    assert experiment_table(own, status_of(own, RecordIndex(tmp_path))).markdown() == (
        "|  | a\\|b |\n| --- | ---: |\n| \\|x\\| | missing (7.00) |"
    )
