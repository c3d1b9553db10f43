"""Records of benchmarks as Markdown tables and as pictures, from the record alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcnet.report import plots, speed_tables, words

Row = dict[str, Any]
SHAPES = ["N512xC64x32", "N256xC64x56"]


def layer_row(shape: str, operator: str, variant: str, ratio: float, **more: Any) -> Row:
    times = {"ms": 2 * ratio, "ms_quartiles": [ratio, 3 * ratio], "ratio": ratio, "ratio_quartiles": [ratio, ratio]}
    row: Row = {"shape": shape, "operator": operator, "variant": variant, "wrong": None, "failed": None}
    return {**row, "kept_mib": 8 * ratio, "memory_ratio": ratio, "forward": times, "training": times, **more}


def layers(device: str = "cuda", shapes: list[str] = SHAPES) -> Row:
    variants = {"conv": 1.0, "eager": 1.25, "compiled": 1.125, "naive": 3.0, "naive-compiled": 2.0}
    operators = ["tanh-cos", "seg-sqcos"]
    rows = [
        layer_row(shape, operator, variant, ratio)
        for shape in shapes
        for operator in operators
        for variant, ratio in variants.items()
    ]
    means = [mean(operator, variant, ratio) for operator in operators for variant, ratio in variants.items()]
    config = {"device": device, "threads": 2, "dtype": "bfloat16", "shapes": shapes, "operators": operators}
    config["variants"] = list(variants)[1:]
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    return {"benchmark": "layers", "config": config, "environment": environment, "results": rows, "means": means}


def mean(operator: str, variant: str, ratio: float) -> Row:
    training = {"ratio": ratio, "host_ratio": ratio + 1, "launches_ratio": 4.0}
    row: Row = {"operator": operator, "variant": variant, "memory_ratio": 1.5, "training": training}
    return {**row, "forward": {"ratio": ratio + 0.1}}


def network() -> Row:
    def row(batch: int, operator: str, ratio: float) -> Row:
        training = {"ms": 10 * ratio, "ratio": ratio}
        named = {"model": "resnet32", "mode": "graph", "batch": batch, "operator": operator}
        return {
            **named,
            "wrong": None,
            "failed": None,
            "training": training,
            "memory_ratio": 1.5,
            "images_per_s": 51200,
        }

    rows = [row(batch, name, ratio) for batch in (512, 128) for name, ratio in {"conv": 1.0, "tanh-cos": 1.2}.items()]
    config = {"device": "cuda", "model": "resnet32", "width": 1.0, "precision": "autocast", "threads": 2}
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    return {"benchmark": "network", "config": config, "environment": environment, "results": rows}


def inference(compiled: bool = False) -> Row:
    def row(operator: str, folded: bool, ms: float) -> Row:
        named = {"network": "cnn9", "operator": operator, "folded": folded, "compiled": compiled}
        return {**named, "wrong": None, "failed": None, "forward": {"ms": ms, "ratio": ms / 4}}

    rows = [row("conv", False, 5.0), row("conv", True, 4.0), row("tanh-cos", False, 10.0), row("tanh-cos", True, 6.0)]
    config = {"device": "cpu", "threads": 1, "dtype": "float32", "batch": 32, "width": 0.5}
    return {"benchmark": "inference", "config": config, "environment": {"torch": "2.13.0"}, "results": rows}


def test_layers_on_a_cpu_have_a_row_for_each_operator():
    record = layers("cpu", SHAPES[:1])
    assert speed_tables.layers_cpu(record).splitlines() == [
        "x `nn.Conv2d`, which takes 2.00 ms and keeps 8 MiB; "
        "N512 C64 32x32, bfloat16, channels last, CPU, 2 threads, torch 2.11.0:",
        "",
        "| operator | dcnet | dcnet, compiled | naive | naive, compiled | kept by dcnet, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| `tanh-cos` | 1.25 | 1.12 | 3.00 | 2.00 | 10 |",
        "| `seg-sqcos` | 1.25 | 1.12 | 3.00 | 2.00 | 10 |",
    ]


def test_layers_on_a_gpu_have_a_column_for_each_shape():
    table = speed_tables.layers_cuda(layers())
    assert "NVIDIA X, torch 2.11.0" in table
    heading = "| operator | form | N512 C64 32x32 | N256 C64 56x56 | mean | forward | launches | memory | naive |"
    assert heading in table
    assert "| `tanh-cos` | dcnet | 1.25 | 1.25 | 1.25 | 1.35 | 4.00 | 1.50 | 3.00 |" in table
    assert "| `seg-sqcos` | dcnet, compiled | 1.12 | 1.12 | 1.12 | 1.23 | 4.00 | 1.50 | 2.00 |" in table


def test_what_was_wrong_is_said_in_its_cell():
    record = layers()
    record["results"][1] = {**layer_row(SHAPES[0], "tanh-cos", "eager", 1.0), "wrong": "output is off by 1"}
    del record["results"][1]["training"]
    record["means"][1]["training"] = {"ratio": None}
    assert "| `tanh-cos` | dcnet | wrong | 1.25 |  | 1.35 |  | 1.50 | 3.00 |" in speed_tables.layers_cuda(record)
    assert plots.speed(record).axes


def test_variants_that_were_not_timed_have_no_row():
    record = layers()
    record["config"]["variants"] = ["eager"]
    record["means"] = [row for row in record["means"] if row["variant"] in ("conv", "eager")]
    table = speed_tables.layers_cuda(record)
    assert "| `tanh-cos` | dcnet | 1.25 | 1.25 | 1.25 | 1.35 | 4.00 | 1.50 |\n" in table + "\n"
    assert "naive" not in table
    assert "compiled" not in table


def test_training_steps_have_a_row_for_each_batch_and_mode():
    table = speed_tables.network(network())
    assert table.startswith("`resnet32`, width 1, autocast, NVIDIA X, torch 2.11.0:\n")
    assert "| `tanh-cos` | 512 | graph | 10.0 | 12.0 | 1.20 | 51,200 | 1.50 |" in table
    assert "| `tanh-cos` | 128 | graph |" in table


def test_inference_compares_folded_with_trained_and_with_plain():
    table = speed_tables.inference(inference())
    assert table.startswith("Batch 32, width 0.5, float32, channels last, CPU, 1 thread, torch 2.13.0:\n")
    assert "| `cnn9`, `conv` | 5.00 | 4.00 | 0.80 | 1.00 |" in table
    assert "| `cnn9`, `tanh-cos` | 10.0 | 6.00 | 0.60 | 1.50 |" in table


def test_inference_compares_compiled_with_compiled():
    record = inference(compiled=True)
    for row in record["results"]:
        # Timed in turns with a plain network that was not compiled.
        row["forward"]["ratio"] = 0.1
    assert "| `cnn9`, `tanh-cos`, compiled | 10.0 | 6.00 | 0.60 | 1.50 |" in speed_tables.inference(record)


def test_the_picture_of_layers_has_a_panel_for_each_operator_and_a_bar_for_each_variant():
    figure = plots.speed(layers())
    assert [axes.get_title() for axes in figure.axes] == ["tanh-cos", "seg-sqcos"]
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["N512 C64 32x32", "N256 C64 56x56"]
        heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
        assert heights == [[1.25, 1.25], [1.125, 1.125], [3, 3], [2, 2]]
        assert axes.get_ylabel() == "time, x nn.Conv2d"
        assert 1.0 in [line.get_ydata()[0] for line in axes.get_lines()]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(words.VARIANTS.values())[1:]
    assert figure.get_suptitle() == "Forward and backward of one layer, bfloat16, NVIDIA X"


def test_of_one_shape_the_operators_stand_side_by_side():
    (axes,) = plots.speed(layers(shapes=SHAPES[:1])).axes
    assert axes.get_title() == "N512 C64 32x32"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["tanh-cos", "seg-sqcos"]


def test_the_pictures_of_networks():
    (axes,) = plots.speed(network()).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["batch 512", "batch 128"]
    assert [bar.get_height() for bar in axes.containers[0]] == [1.2, 1.2]
    (axes,) = plots.speed(inference()).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1.25, 2.5], [1.0, 1.5]]


@pytest.mark.parametrize("record", [layers(), network(), inference()], ids=lambda record: record["benchmark"])
def test_a_picture_is_drawn_from_what_was_written(record: Row, tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(record))
    plots.save(plots.speed(json.loads((tmp_path / "record.json").read_text())), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_of_nothing_there_is_no_picture():
    record = {**layers(), "results": []}
    with pytest.raises(ValueError, match="nothing was timed in this record of 'layers'"):
        plots.speed(record)


@pytest.mark.parametrize(
    ("shape", "text"),
    [("N8xC3x32", "N8 C3 32x32"), ("N8xC3x32x48", "N8 C3 32x48"), ("N8xC3x32xK5", "N8 C3 32x32, 5x5 filters")],
)
def test_shapes_are_spelled_out(shape: str, text: str):
    assert words.spell(shape) == text


def test_numbers_have_the_digits_that_count():
    assert [words.three_digits(ms) for ms in (0.01234, 1.234, 12.34, 123.4)] == ["0.012", "1.23", "12.3", "123.4"]
    assert words.two_digits(None) == ""
