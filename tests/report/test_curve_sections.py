"""Grouping of runs into charts of training curves, and the names of their lines."""

from pathlib import Path
from typing import Any

import pytest
from helpers.page_records import a_run, drawn, put, values_of

from dcnet.experiments import Cell, Experiment, get_experiment
from dcnet.experiments.experiment import experiments
from dcnet.training import Run, recipe

LRS = (0.1, 0.2, 0.3, 0.4, 0.5)


def trained(folder: Path, cell: Cell, seed: int = 0, **more: Any) -> None:
    """A record of the run of a cell, with the curves of another run."""
    (config,) = [one for one in cell.configs(seed + 1) if one.seed == seed]
    name, _, mark = Run.of(config, folder).folder.name.rpartition("-")
    put(folder, f"{name}-{mark}", a_run(name=name, hash=mark, config=config.described(), **more))


def lines(folder: Path) -> dict[str, list[str]]:
    """The line names of each chart of curves, by its key."""
    figures = drawn(folder).one("section", id="curves").all("figure")
    return {figure.attributes["id"]: [line["name"] for line in values_of(figure)["lines"]] for figure in figures}


def test_table_with_few_runs_is_one_chart_labeled_by_cell(tmp_path: Path):
    table3 = get_experiment("table3")
    plain, *_, last = table3.cells
    for seed in (0, 1):
        trained(tmp_path, plain, seed)
    trained(tmp_path, last)
    assert lines(tmp_path) == {"chart-table3": ["baseline, cos, no ReLU, mean of 2", "mix, sqcos, ReLU"]}


def test_maximum_number_of_lines_is_one_chart(tmp_path: Path):
    for cell in get_experiment("table3").cells[:8]:
        trained(tmp_path, cell)
    assert {key: len(names) for key, names in lines(tmp_path).items()} == {"chart-table3": 8}


def test_columns_that_differ_in_a_symbol_have_separate_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With equal ids, the buttons of the second chart would change the first."""
    epochs = {"+1": 2, "-1": 3}
    cells = [Cell(f"{lr}", sign, recipe("digits", lr=lr, epochs=epochs[sign])) for lr in LRS for sign in epochs]
    monkeypatch.setitem(experiments, "signs", lambda: Experiment("signs", "Signs", tuple(cells)))
    for cell in cells:
        trained(tmp_path, cell)
    assert {key: len(names) for key, names in lines(tmp_path).items()} == {"chart-signs--1": 5, "chart-signs--1-2": 5}


def test_tables_of_evaluations_have_no_training_curves(tmp_path: Path):
    """A network has several cells in Table 7."""
    clean = get_experiment("table7").cells[0]
    assert clean.metric == ("evaluations", "attacks", "clean")
    trained(tmp_path, clean, evaluations={"attacks": {"clean": 0.9}})
    assert list(lines(tmp_path)) == ["chart-cifar10-cnn9-small"]


def test_findings_are_shown_below_the_title(tmp_path: Path):
    plain, _, sphere, *_ = get_experiment("table3").cells
    for cell, seed, error in ((plain, 0, 50.0), (plain, 1, 51.0), (sphere, 0, 33.0)):
        trained(tmp_path, cell, seed, results={"test_error": error})
    part = drawn(tmp_path).one("section", id="tables")
    assert "1 of 1 pair that differs by more than seed noise (2.00) ranks as in the paper." in part.text
    assert "1 of 2 compared cells is within 1.00 of the paper; 1 is better by more: baseline in cos" in part.text


@pytest.mark.parametrize(
    ("name", "charts"),
    [
        ("table3", {"cos--no-ReLU": 8, "sqcos--no-ReLU": 7, "cos--ReLU": 8, "sqcos--ReLU": 7}),
        ("fair_trials", {"plain--ReLU": 6, "seg-sqcos--no-ReLU": 6}),
    ],
)
def test_table_with_many_runs_has_a_chart_per_column_or_row(tmp_path: Path, name: str, charts: dict[str, int]):
    experiment = get_experiment(name)
    for cell in experiment.cells:
        trained(tmp_path, cell)
    found = lines(tmp_path)
    prefix = "chart-" + name.replace("_", "-") + "-"
    assert {key: len(names) for key, names in found.items()} == {prefix + key: count for key, count in charts.items()}
    assert {each for names in found.values() for each in names} <= {*experiment.rows, *experiment.columns}


@pytest.mark.parametrize(
    ("name", "words"),
    [("table3", "Test error in % by step"), ("fair_trials", "Validation error in % by step")],
)
def test_error_on_held_out_training_images_is_called_validation_error(tmp_path: Path, name: str, words: str):
    trained(tmp_path, get_experiment(name).cells[0])
    figure = drawn(tmp_path).one("section", id="curves").one("figure")
    assert figure.one("strong").text == words
    assert f"{words.split(' in ')[0].lower()}, %" in [text.text for text in figure.all("text")]


def test_runs_are_drawn_once_and_runs_without_a_table_last(tmp_path: Path):
    table4, table1 = get_experiment("table4"), get_experiment("table1")
    shared = {cell.config for cell in table4.cells} & {cell.config for cell in table1.cells} - {None}
    assert shared
    for cell in table4.cells[:4]:
        trained(tmp_path, cell)
    trained(tmp_path, next(cell for cell in table1.cells if cell.config in shared))
    put(tmp_path, "digits", a_run())
    assert list(lines(tmp_path)) == ["chart-figure4", "chart-digits-cnn9-small"]


def test_network_at_chance_level_did_not_converge_even_before_evaluation(tmp_path: Path):
    """`dcnet reproduce` reports it as not converged; the page must not show it as missing."""
    trained(tmp_path, get_experiment("table7").cells[0], results={"test_error": 90.0})
    shown = [node.text for node in drawn(tmp_path).one("section", id="tables").all("summary")]
    assert shown.count("N/C (1 of 3 seeds)") == 6  # three numbers each of Tables 7 and 8
