"""Which runs share a chart of training curves, and what their lines are called."""

from pathlib import Path

import pytest
from page_records import a_run, drawn, put, values_of

from dcnet.experiments import chosen
from dcnet.experiments.experiment import Cell
from dcnet.training import Run


def trained(folder: Path, cell: Cell, seed: int = 0) -> None:
    """A record of the cell's run, with the curves of some other one."""
    (config,) = [one for one in cell.configs(seed + 1) if one.seed == seed]
    name, _, mark = Run.of(config, folder).folder.name.rpartition("-")
    put(folder, f"{name}-{mark}", a_run(name=name, hash=mark, config=config.described()))


def lines(folder: Path) -> dict[str, list[str]]:
    """The names of the lines of each chart of curves, by its key."""
    figures = drawn(folder).one("section", id="curves").all("figure")
    return {figure.attributes["id"]: [line["name"] for line in values_of(figure)["lines"]] for figure in figures}


def test_a_table_of_few_runs_is_one_chart_with_the_names_of_its_cells(tmp_path: Path):
    (table3,) = chosen(["table3"])
    plain, *_, last = table3.cells
    for seed in (0, 1):
        trained(tmp_path, plain, seed)
    trained(tmp_path, last)
    assert lines(tmp_path) == {"chart-table3": ["baseline, cos, no ReLU, mean of 2", "mix, sqcos, ReLU"]}


@pytest.mark.parametrize(
    ("name", "charts"),
    [
        ("table3", {"cos--no-ReLU": 8, "sqcos--no-ReLU": 7, "cos--ReLU": 8, "sqcos--ReLU": 7}),
        ("fair_trials", {"plain--ReLU": 6, "seg-sqcos--no-ReLU": 6}),
    ],
)
def test_a_table_of_many_has_one_for_each_column_or_row(tmp_path: Path, name: str, charts: dict[str, int]):
    (experiment,) = chosen([name])
    for cell in experiment.cells:
        trained(tmp_path, cell)
    found = lines(tmp_path)
    prefix = "chart-" + name.replace("_", "-") + "-"
    assert {key: len(names) for key, names in found.items()} == {prefix + key: count for key, count in charts.items()}
    assert {each for names in found.values() for each in names} <= {*experiment.rows, *experiment.columns}


def test_no_run_is_drawn_twice_and_those_of_no_table_come_last(tmp_path: Path):
    (table4,), (table5,) = chosen(["table4"]), chosen(["table5"])
    shared = {cell.config for cell in table4.cells} & {cell.config for cell in table5.cells} - {None}
    assert shared
    for cell in table4.cells[:4]:
        trained(tmp_path, cell)
    trained(tmp_path, next(cell for cell in table5.cells if cell.config in shared))
    put(tmp_path, "digits", a_run())
    assert list(lines(tmp_path)) == ["chart-figure4", "chart-digits-cnn9-small"]
