"""Tables of layers of every kind, and texts of their shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcnet.report import results, speed_plots, speed_tables, twin_tables
from dcnet.report.speed_cells import spell, twin_of

Row = dict[str, Any]
SHAPES = ["M50432x384-1536", "N64xC256x28xG256", "B64xH6xT197xD64"]
MS = {"conv": 4.0, "conv-compiled": 2.0, "eager": 6.0, "compiled": 2.5}


def layer_row(shape: str, operator: str, variant: str) -> Row:
    ms = MS[variant]
    ratio = ms / (2.0 if variant.endswith("compiled") else 4.0)
    times = {"ms": ms, "ratio": ratio, "host_ratio": 2 * ratio, "launches": 3, "launches_ratio": 3.0}
    row: Row = {"shape": shape, "operator": operator, "variant": variant, "wrong": None, "failed": None}
    if shape.startswith("B") and operator == "tanh-cos":
        return {**row, "skipped": f"tanh-cos at {shape} is not supported: attention has no mean"}
    return {**row, "peak_mib": 8.0, "memory_ratio": 1.5, "forward": {**times, "ratio": 1.75}, "training": times}


def twins(device: str = "cuda") -> Row:
    operators = ["tanh-cos", "sphere-cos"]
    rows = [layer_row(shape, operator, name) for shape in SHAPES for operator in operators for name in MS]
    config = {"device": device, "threads": 2, "dtype": "bfloat16", "shapes": SHAPES, "operators": operators}
    config["variants"] = ["eager", "compiled"]
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    record = {"benchmark": "layers", "complete": True, "config": config, "environment": environment, "results": rows}
    return {**record, "means": []}


def test_there_is_a_table_per_kind_of_layer():
    linear, images, attention = (table.markdown_section() for table in twin_tables.twin_tables(twins()))
    title = "Linear layers, forward and backward, compared with `nn.Linear`, by CUDA graphs, bfloat16, NVIDIA X"
    assert linear.startswith(f"{title}, torch 2.11.0:")
    headings = "plain, ms | decoupled, ms | ratio | forward | from host | launches | memory"
    assert f"| shape | operator | form | {headings} |" in linear
    name = "M50432, 384 to 1536"
    assert f"| {name} | `tanh-cos` | dcnet | 4.00 | 6.00 | 1.50 | 1.75 | 3.00 | 3.00 | 1.50 |" in linear
    assert f"| {name} | `tanh-cos` | dcnet, compiled | 2.00 | 2.50 | 1.25 | 1.75 | 2.50 | 3.00 | 1.50 |" in linear
    assert "compared with `nn.Conv2d`" in images
    assert "| N64 C256 28x28, depthwise | `sphere-cos` | dcnet |" in images
    assert "compared with `scaled_dot_product_attention`" in attention
    assert "| `tanh-cos` |" not in attention
    assert attention.endswith("- `tanh-cos` at B64 H6 T197 D64 is not supported: attention has no mean.")


def test_kinds_that_were_not_timed_have_no_table():
    record = twins()
    for row in record["results"]:
        if row["shape"].startswith("M"):
            row["skipped"] = f"{row['operator']} at {row['shape']} was not timed: the limit of 1 minutes had passed"
    text = twin_tables.twins(record)
    assert "Linear layers" not in text
    assert "Attention" in text
    assert text.endswith("Not timed in this record: `nn.Linear`.")


def test_problems_are_in_their_cells():
    record = twins()
    failed = record["results"][2]
    failed["failed"] = "RuntimeError: no memory"
    del failed["training"]
    assert "| `tanh-cos` | dcnet | failed | failed | failed |" in twin_tables.twins(record)


def test_the_table_is_absent_without_a_record(tmp_path: Path):
    marks = "<!-- twins_cuda -->\n<!-- /twins_cuda -->\n"
    assert results.fill(marks, tmp_path) == marks
    (tmp_path / "twins_cuda.json").write_text(json.dumps(twins()))
    assert "Linear layers, forward and backward" in results.fill(marks, tmp_path)


def test_the_docs_have_marks_for_both_records():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for name in ("twins_cuda", "timm_cuda"):
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- /{name} -->\n") == 1


def test_plots_leave_out_plain_layers():
    figure = speed_plots.speed_plot(twins())
    assert [axes.get_title() for axes in figure.axes] == ["tanh-cos", "sphere-cos"]
    assert figure.axes[0].get_ylabel() == "time, x plain layer"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["dcnet", "dcnet, compiled"]


def test_terminal_tables_name_the_twin_and_the_compiled_base():
    tables = speed_tables.terminal_tables(twins())
    assert [row[1] for row in tables[0].rows[:2]] == ["nn.Linear", "nn.Linear, compiled"]
    assert speed_tables.COMPILED_BASE in tables[0].notes
    old = twins()
    old["results"] = [row for row in old["results"] if row["variant"] != "conv-compiled"]
    assert speed_tables.COMPILED_BASE not in speed_tables.terminal_tables(old)[0].notes


@pytest.mark.parametrize(
    ("shape", "text", "twin"),
    [
        ("N512xC64x32", "N512 C64 32x32", "nn.Conv2d"),
        ("N8xC64x32x48xK5", "N8 C64 32x48, 5x5 filters", "nn.Conv2d"),
        ("N8xC64x32xK7xG64", "N8 C64 32x32, 7x7 filters, depthwise", "nn.Conv2d"),
        ("N8xC64x32xG4", "N8 C64 32x32, 4 groups", "nn.Conv2d"),
        ("N8xC64xL100xK5", "N8 C64 L100, filters of 5", "nn.Conv1d"),
        ("N8xC64xD4x6", "N8 C64 4x6x6", "nn.Conv3d"),
        ("N8xC64xD4x6x7xK1", "N8 C64 4x6x7, 1x1x1 filters", "nn.Conv3d"),
        ("M8x3-4", "M8, 3 to 4", "nn.Linear"),
        ("B1xH2xT3xD4", "B1 H2 T3 D4", "scaled_dot_product_attention"),
    ],
)
def test_shapes_in_words(shape: str, text: str, twin: str):
    assert (spell(shape), twin_of(shape)) == (text, twin)
