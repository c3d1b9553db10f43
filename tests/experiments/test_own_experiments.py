"""Experiments of one's own, by any names and titles."""

from pathlib import Path

import pytest
from fake_records import small

from dcnet.cli.app import main
from dcnet.experiments import Cell, Experiment, status_of
from dcnet.experiments.experiment import experiments, register
from dcnet.experiments.known import Known
from dcnet.report.experiments import markdown_table


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


def table(columns=("error",), **about):
    return Experiment("own", "own", tuple(Cell(row, column, small()) for row in "ab" for column in columns), **about)


@pytest.mark.parametrize(
    ("columns", "about", "said"),
    [
        (("error", "error"), {}, "two cells in the row 'a' and the column 'error'"),
        (("easy", "hard"), {"contest": True}, "a contest, and its row 'a' has several cells: give each rival one"),
        (("error",), {"seeds": 0}, "seeds=0: give 1 or more"),
    ],
)
def test_what_makes_no_table_is_refused(columns, about, said):
    with pytest.raises(ValueError, match=said):
        table(columns, **about)


def test_several_columns_make_a_table_and_one_a_contest():
    assert table(("easy", "hard")).columns == ["easy", "hard"]
    assert table(contest=True).rows == ["a", "b"]


def test_an_experiment_goes_by_the_name_of_its_function(capsys, monkeypatch):
    monkeypatch.setitem(experiments, "copy", table)
    assert main(["reproduce", "copy", "--status"]) == 2
    assert "the experiment of the function copy is called 'own': give both the same name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["all", "figure_of_merit"])
def test_names_that_mean_others_are_refused(name):
    def make() -> Experiment:
        return table()

    make.__name__ = name
    with pytest.raises(ValueError, match="is no name for an experiment"):
        register(make)


def test_a_bar_in_a_name_begins_no_column_of_markdown(tmp_path):
    own = Experiment("own", "own", (Cell("|x|", "a|b", small(), 7.0),))
    assert markdown_table(own, status_of(own, Known(tmp_path))) == (
        "|  | a\\|b |\n| --- | ---: |\n| \\|x\\| | missing (7.00) |"
    )
