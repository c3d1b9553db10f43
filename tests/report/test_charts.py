"""Geometry of the charts on the page: scales, ticks and units."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.page_records import RESULTS, a_run, drawn, put, real_tree, values_of
from helpers.page_tree import Node, read

from dcnet.experiments import get_experiment
from dcnet.report.chart import Axis, Cloud, Line, LineChart, PointChart
from dcnet.report.page.charts import line_chart, point_chart


def places(path: Node) -> list[tuple[float, float]]:
    """The points of a path, in pixels from the left and from the top."""
    numbers = [float(number) for number in re.split("[ MLh]", path.attributes["d"] or "") if number]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def line_of(x: Axis, y: Axis, line: Line) -> list[tuple[float, float]]:
    return places(read(line_chart("some", LineChart("Some", x, y, [line]))).one("path"))


def test_larger_values_are_further_right_and_higher():
    (left, low), (right, high) = line_of(Axis("x", 0, 10), Axis("y", 0, 100), Line("a", [1, 9], [10, 90]))
    assert left < right
    assert low > high


def test_log_scale_spaces_powers_of_ten_equally():
    axis = Axis("x", 1, 1000, log=True)
    points = line_of(axis, axis, Line("a", [1, 10, 100], [1, 10, 100]))
    for values in zip(*points, strict=True):
        assert values[1] - values[0] == pytest.approx(values[2] - values[1], abs=0.2)


def test_points_keep_their_positions_and_outliers_are_omitted():
    chart = read(point_chart("some", PointChart("Some", [Cloud("a", [(0.5, 0.5), (-0.5, -0.5), (3.0, 0.0)])], 1.0)))
    numbers = [float(number) for number in re.findall(r"[\d.]+", (chart.one("path").attributes["d"] or ""))]
    x, y = numbers[::3], numbers[1::3]
    assert len(x) == 2
    assert x[0] > x[1]
    assert y[0] < y[1]


def test_seeds_are_drawn_as_their_mean(tmp_path: Path):
    for seed, accuracy in ((0, 90.0), (1, 70.0)):
        run = a_run(hash=f"0000000{seed}")
        run["config"] = run["config"] | {"seed": seed}
        run["curves"] = run["curves"] | {"test_accuracy": [accuracy] * len(run["curves"]["step"])}
        put(tmp_path, f"run{seed}", run)
    (line,) = values_of(drawn(tmp_path).one("figure", id="chart-digits-cnn9-small"))["lines"]
    assert set(line["y"]) == {"20.00"}


def test_axis_ignores_early_errors(tmp_path: Path):
    run = a_run()
    count = len(run["curves"]["step"])
    run["curves"] = run["curves"] | {"test_accuracy": [2.0] + [91.5] * (count - 1)}
    put(tmp_path, "run", run)
    figure = drawn(tmp_path).one("figure", id="chart-digits-cnn9-small")
    marks = [float(text.text) for text in figure.all("text") if text.attributes["text-anchor"] == "end"]
    assert max(marks) == 9


def test_memory_of_heads_is_in_the_unit_of_its_axis():
    figure = real_tree().one("section", id="heads").one("figure", id="heads-heads_cpu-128-GiB")
    line = next(line for line in values_of(figure)["lines"] if line["name"] == "MarginSoftmax")
    rows = json.loads((RESULTS / "heads_cpu.json").read_text())["results"]
    assert line["y"] == [f"{row['peak_mib'] / 1024:.4g}" for row in rows if row["head"] == "margin"]


def test_axis_ends_where_no_network_has_accuracy_left(tmp_path: Path):
    card = {"by_epsilon": {"epsilons": [0.0, 0.1, 0.2, 1.0], "accuracies": [0.9, 0.5, 0.0, 0.0]}}
    put(tmp_path, "run", a_run(evaluations={"card": card}))
    figure = drawn(tmp_path).one("section", id="robustness").one("figure")
    assert values_of(figure)["x"]["high"] == 0.2


def test_dots_on_the_edge_of_the_frame_are_not_clipped():
    for figure in real_tree().one("section", id="robustness").all("figure"):
        (box,) = figure.all("clippath")
        left, top, width, height = (float(box.one("rect").attributes[name]) for name in ("x", "y", "width", "height"))
        for dot in figure.all("circle"):
            across, up, radius = (float(dot.attributes[name]) for name in ("cx", "cy", "r"))
            if values_of(figure)["x"]["high"] >= max(values_of(figure)["lines"][0]["x"]):
                assert left <= across - radius
                assert across + radius <= left + width
            assert top <= up - radius
            assert up + radius <= top + height


def test_title_of_network_speed_names_the_network():
    heading = real_tree().one("section", id="speed").one("h3", id="speed-network_cuda")
    assert heading.text.startswith("Training step of resnet32, autocast, NVIDIA H200")


def measured(accuracy: float) -> dict[str, Any]:
    """The first cell of Table 7, where the paper has 85.35."""
    config = get_experiment("table7").cells[0].config
    assert config is not None
    own = {"name": config.name, "hash": config.hash, "config": config.described()}
    return a_run(evaluations={"attacks": {"clean": accuracy / 100}}, **own)


@pytest.mark.parametrize(("accuracy", "place"), [(85.85, "ahead"), (84.85, "behind")])
def test_higher_numbers_are_ahead_if_higher_is_better(tmp_path: Path, accuracy: float, place: str):
    put(tmp_path, "run", measured(accuracy))
    shown = [node for node in drawn(tmp_path).all("span") if node.text == f"{accuracy - 85.35:+.2f}"]
    assert {node.attributes["class"] for node in shown} == {place}


def test_cell_with_missing_seeds_does_not_count_as_done(tmp_path: Path):
    put(tmp_path, "run", measured(85.0))
    rows = drawn(tmp_path).one("section", id="overview").all("tr")
    (own,) = [row for row in rows if row.text.startswith("Table 7 ")]
    assert own.text.startswith("Table 7 0 of 26 ")


def test_run_that_did_not_converge_has_its_command(tmp_path: Path):
    config = get_experiment("table2").cells[1].config
    assert config is not None
    own = {"name": config.name, "hash": config.hash, "config": config.described()}
    put(tmp_path, "run", a_run(status="diverged", results={}, command="dcnet train --of this", **own))
    shown = [node for node in drawn(tmp_path).one("section", id="tables").all("details") if "N/C" in node.text]
    assert ["dcnet train --of this" in node.text for node in shown] == [True]


def test_page_omits_interrupted_benchmarks(tmp_path: Path):
    record = json.loads((RESULTS / "layers_cpu.json").read_text())
    put(tmp_path, "layers", record | {"complete": False})
    assert "No records of benchmarks" in drawn(tmp_path).one("section", id="speed").text
