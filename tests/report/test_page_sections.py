"""The sections of the page, each with its records."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.page_records import RESULTS, a_run, drawn, features, put, real_tree, values_of
from helpers.page_tree import read

from dcnet import angle, magnitude
from dcnet.cli.app import parse
from dcnet.experiments import Cell, CellStatus, Experiment
from dcnet.report.chart import BarChart, BarGroup
from dcnet.report.page import paper_sections
from dcnet.report.page.charts import Scale, bar_chart, spelled
from dcnet.report.page.markup import data
from dcnet.report.page.operator_sections import sliders
from dcnet.report.page.page_sources import CellResult
from dcnet.report.page.provenance import bench_command
from dcnet.report.page.robustness_sections import curves_in
from dcnet.training import recipe


def test_figure_4_has_the_errors_of_the_records_by_step(tmp_path: Path):
    """Uses the records of three operators."""
    wanted = ["", " --operators conv", " --operators seg-cos"]
    commands = {f"dcnet train --recipe paper-cifar{options}" for options in wanted}
    records = [json.loads(file.read_text()) for file in sorted((RESULTS / "cifar100").glob("*resnet32*.json"))]
    chosen = {record["config"]["operator"]: record for record in records if record["command"] in commands}
    for operator, record in chosen.items():
        put(tmp_path, operator, record)
    figure = drawn(tmp_path).one("figure", id="chart-figure4")
    lines = {line["name"]: line for line in values_of(figure)["lines"]}
    assert list(lines) == ["conv", "tanh-cos", "seg-cos"]
    for operator, line in lines.items():
        assert line["x"] == chosen[operator]["curves"]["step"]
        assert line["y"] == [f"{100 - value:.2f}" for value in chosen[operator]["curves"]["test_accuracy"]]
        assert chosen[operator]["command"] in figure.text
    assert [node.text for node in figure.one("ul", class_="legend").all("button")] == list(lines)


def test_lines_beyond_the_maximum_start_hidden(tmp_path: Path):
    for i in range(10):
        record = a_run(hash=f"{i:08d}")
        record["config"] = record["config"] | {"lr": 0.1 * (i + 1)}
        put(tmp_path, str(i), record)
    figure = drawn(tmp_path).one("figure", id="chart-digits-cnn9-small")
    pressed = [node.attributes["aria-pressed"] for node in figure.all("button")]
    assert pressed == ["true"] * 8 + ["false"] * 2
    hidden = [node.attributes.get("visibility") for node in figure.all("g", class_="series")]
    assert hidden == [None] * 8 + ["hidden"] * 2


def test_all_operators_and_sliders_are_shown():
    part = real_tree().one("section", id="operators")
    assert (
        {node.attributes["data-symbol"] for node in part.all("input")}
        == set(sliders())
        == {"alpha", "beta", "rho", "q", "k"}
    )
    for figure, registry in (("chart-magnitudes", magnitude.registry), ("chart-angles", angle.registry)):
        groups = [node for node in part.one("figure", id=figure).all("g") if "data-part" in node.attributes]
        assert [node.attributes["data-part"] for node in groups] == list(registry)
        assert all(len(str(node.one("path").attributes["d"])) > 100 for node in groups)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_features_are_points_with_their_numbers_and_command(tmp_path: Path, dimensions: int):
    put(tmp_path, "some", features(dimensions))
    part = drawn(tmp_path).one("section", id="features")
    assert [node.text for node in part.all("button")] == ["zero", "<one>"]
    dots = [str(node.attributes["d"]) for node in part.all("path", class_="dots")]
    assert [text.count("h0") for text in dots] == [1, 2]
    assert [node.text for node in part.all("summary")] == ["98.77", "4.3", "90.0", "45.7", "0.1235"]
    assert all(node.attributes["title"] == features()["command"] for node in part.all("summary"))


def test_cells_with_fewer_seeds_differ_from_missing_cells():
    cells = tuple(Cell(name, "error", recipe("digits", width=width)) for name, width in (("a", 1.0), ("b", 0.5)))
    experiment = Experiment("two", "two", cells, seeds=2)
    expected = {"2 cells, 1 missing and 1 with fewer seeds: run dcnet reproduce two.": [(5.0,), ()]}
    expected |= {"2 cells, 2 with fewer seeds: run dcnet reproduce two.": [(5.0,), (5.0,)]}
    expected |= {"All cells are done.": [(5.0, 6.0), (5.0, 6.0)]}
    for words, values in expected.items():
        found = [CellResult(CellStatus(cell, own, 0, 2), ()) for cell, own in zip(cells, values, strict=True)]
        assert re.sub("<[^>]*>", "", paper_sections._missing(experiment, found)) == words


@pytest.mark.parametrize("seeds", [1, 2])
def test_line_of_one_evaluation_is_a_dot(tmp_path: Path, seeds: int):
    for seed in range(seeds):
        record = a_run(hash=f"{seed:08d}")
        record["config"] = record["config"] | {"seed": seed}
        record["curves"] = {name: values[:1] for name, values in record["curves"].items()}
        put(tmp_path, str(seed), record)
    figure = drawn(tmp_path).one("figure", id="chart-digits-cnn9-small")
    (series,) = figure.all("g", class_="series")
    dot = series.one("circle")
    assert series.one("path").attributes["d"] == f"M{dot.attributes['cx']} {dot.attributes['cy']}"


@pytest.mark.parametrize(("accuracy", "marks"), [(0.0, ("99", "100")), (100.0, ("0", "1")), (50.0, ("50", "51"))])
def test_constant_error_has_an_axis_within_0_and_100(tmp_path: Path, accuracy: float, marks: tuple[str, str]):
    run = a_run()
    run["curves"]["test_accuracy"] = [accuracy] * len(run["curves"]["step"])
    put(tmp_path, "run", run)
    figure = drawn(tmp_path).one("section", id="curves").one("figure")
    errors = [text.text for text in figure.all("text") if text.attributes["text-anchor"] == "end"]
    assert (errors[0], errors[-1]) == marks


def test_line_of_several_evaluations_has_no_dots(tmp_path: Path):
    put(tmp_path, "run", a_run())
    assert not drawn(tmp_path).one("figure", id="chart-digits-cnn9-small").all("circle")


def test_curves_in_finds_exactly_the_three_forms():
    found = list(
        curves_in(
            {
                "attacks": {"by_steps": {"20": 0.1, "5": 0.2}, "clean": 0.9, "white_box": {"fgsm": 0.3}},
                "corrupted": {"accuracies": {"noise": [0.9, 0.8], "kind": "x"}},
                "transfer": {"accuracies": {"fgsm": 0.5}},
                "odd": {"epsilons": ["a"], "accuracies": [1], "by_epsilon": {"x": 1.0}},
            }
        )
    )
    assert [(one.name, one.axis, one.points) for one in found] == [
        ("attacks by steps", "steps", ((5.0, 0.2), (20.0, 0.1))),
        ("corrupted noise", "severity", ((1.0, 0.9), (2.0, 0.8))),
    ]


def test_speed_section_has_the_ratios_of_the_records():
    part = real_tree().one("section", id="speed")
    record = json.loads((RESULTS / "layers_cpu.json").read_text())
    own = part.one("figure", id="speed-layers_cpu-0")
    ratios = [row["training"]["ratio"] for row in record["results"] if not row["variant"].startswith("conv")]
    assert sorted(node.text for node in own.all("text", class_="value")) == sorted(f"{ratio:.2f}" for ratio in ratios)
    assert bench_command(record) in part.text


@pytest.mark.parametrize("most", [0.4, 1.4, 2.7, 10.0, 300.0])
def test_base_line_is_drawn_without_a_tick(most: float):
    chart = read(
        bar_chart("some", BarChart("Some", "x", [BarGroup("one", {"eager": most, "compiled": most / 2})], base=1.0))
    )
    (line,) = [line for line in chart.all("line") if line.attributes.get("class") == "base"]
    longest = chart.all("rect")[0].attributes
    start, width = float(longest["x"]), float(longest["width"])
    assert float(line.attributes["x1"]) == pytest.approx(start + width / most, abs=0.2)


def test_heads_section_has_times_and_memory():
    part = real_tree().one("section", id="heads")
    lines = {line["name"]: line for line in values_of(part.one("figure", id="heads-heads_cpu-128-ms"))["lines"]}
    record = json.loads((RESULTS / "heads_cpu.json").read_text())
    linear = [row for row in record["results"] if row["head"] == "linear" and "training" in row]
    assert lines["nn.Linear and cross entropy"]["y"] == [f"{row['training']['ms']:.4g}" for row in linear]


@pytest.mark.parametrize("name", ["layers_cpu", "inference_cpu", "heads_cpu"])
def test_bench_command_parses_to_the_config_of_the_record(name: str):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    words = shlex.split(bench_command(record))[1:]
    command = parse(words)
    session: Any = command.prepare().__self__
    # A record from before an option existed does not have it.
    later = {name: value for name, value in session.benchmark.described().items() if value is not None}
    assert later == {name: value for name, value in record["config"].items() if value is not None}


@pytest.mark.parametrize("words", ["network --no-fuse", "network", "blocks --blocks 2 --shapes N2xC4x6"])
def test_bench_command_repeats_the_options(words: str):
    def described(arguments: list[str]) -> Any:
        session: Any = parse(arguments).prepare().__self__
        return session.benchmark.described()

    name, *given = words.split()
    config = described(["bench", name, "--device", "cpu", *given])
    command = bench_command({"benchmark": name, "config": config})
    assert ("--no-fuse" in command) == ("--no-fuse" in words)
    assert described(shlex.split(command)[1:]) == config


def test_scale_has_round_ticks():
    scale = Scale(0, 10, 0, 100)
    assert (scale(0), scale(5), scale(10)) == (0, 50, 100)
    assert scale.ticks() == [0, 2, 4, 6, 8, 10]
    powers = Scale(0.5, 2e3, 0, 100, log=True)
    assert powers.ticks() == [1, 10, 100, 1000]
    assert math.isclose(powers(2e3), 100)
    words = {0: "0", 0.25: "0.25", 20000: "20,000", 1e6: "1e6", 10.0: "10", 0.0001: "0.0001"}
    assert {value: spelled(value) for value in words} == words


def test_data_for_scripts_is_json_for_any_names():
    """A word that is not JSON, such as NaN, would break all readers below the chart."""
    names = ["<!-- a", "</script>", "a < b"]
    text = re.sub("<[^>]*>", "", data(names))
    assert json.loads(text) == names
    assert "<" not in text
