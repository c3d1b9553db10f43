"""Tables and plots of benchmark records."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.speed_records import blocks, inference, network

from dcnet.report import drawing, speed_cells, speed_plots, speed_tables

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


def test_wrong_results_are_marked_in_their_cell():
    record = layers()
    record["results"][1] = {**layer_row(SHAPES[0], "tanh-cos", "eager", 1.0), "wrong": "output is off by 1"}
    del record["results"][1]["training"]
    record["means"][1]["training"] = {"ratio": None}
    assert "| `tanh-cos` | dcnet | wrong | 1.25 |  | 1.35 |  | 1.50 | 3.00 |" in speed_tables.layers_cuda(record)
    assert speed_plots.speed_plot(record).axes


def test_variants_without_times_have_no_row():
    record = layers()
    record["config"]["variants"] = ["eager"]
    record["means"] = [row for row in record["means"] if row["variant"] in ("conv", "eager")]
    table = speed_tables.layers_cuda(record)
    assert "| `tanh-cos` | dcnet | 1.25 | 1.25 | 1.25 | 1.35 | 4.00 | 1.50 |\n" in table + "\n"
    assert "naive" not in table
    assert "compiled" not in table


def test_blocks_have_times_and_ratios_by_shape():
    lines = speed_tables.blocks(blocks()).splitlines()
    assert lines[0] == (
        "Forward and backward of 4 blocks, ms (x plain, compiled), by CUDA graphs, bfloat16, channels last, "
        "NVIDIA X, torch 2.11.0:"
    )
    assert lines[2] == "| operator | form | N512 C96 32x32 | N512 C192 16x16 | mean | forward | launches | memory |"
    assert lines[4] == "| `conv` | plain | 3.00 (x 1.50) | 3.00 (x 1.50) | 1.50 | 1.50 | 0.50 | 1.50 |"
    assert lines[5].startswith("| `conv` | plain, compiled | 2.00 (x 1.00) |")
    assert lines[8] == "| `tanh-cos` | dcnet, fused | 2.25 (x 1.12) | 2.25 (x 1.12) | 1.12 | 1.12 | 0.50 | 1.50 |"
    assert len(lines) == 9


def test_blocks_that_are_wrong_are_marked():
    record = blocks()
    record["results"][4] |= {"wrong": "output is off by 1"}
    record["means"][4]["training"] = {"ratio": None}
    assert "| `tanh-cos` | dcnet, fused | wrong | 2.25 (x 1.12) |  |" in speed_tables.blocks(record)


def test_a_note_says_if_nothing_was_fused():
    assert speed_tables.blocks(blocks(fused_blocks=0)).endswith(f"- {speed_tables.NOT_FUSED}")
    shown, *_ = speed_tables.terminal_tables(blocks(fused_blocks=0))
    assert list(shown.notes) == [speed_tables.NOT_FUSED]
    assert speed_tables.NOT_FUSED not in speed_tables.blocks(blocks())


def test_blocks_in_the_terminal():
    first, second, means = speed_tables.terminal_tables(blocks())
    assert first.title == "4 blocks, N512 C96 32x32, bfloat16, NVIDIA X"
    assert second.title == "4 blocks, N512 C192 16x16, bfloat16, NVIDIA X"
    assert first.headings[3] == first.headings[5] == "x plain compiled"
    assert first.rows[0][:3] == ["tanh-cos", "plain", "3.00"]
    assert list(first.rows[4]) == ["", "dcnet, fused", "2.25", "1.12", "2.25", "1.12", "7", "8.0"]
    assert [row[1] for row in means.rows] == ["plain", "dcnet, not fused", "dcnet, not fused, compiled", "dcnet, fused"]
    assert means.title.startswith("x plain, compiled, geometric mean")


def test_plot_of_blocks_is_relative_to_compiled_plain_blocks():
    figure = speed_plots.speed_plot(blocks())
    (axes,) = figure.axes
    assert axes.get_title() == "tanh-cos"
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [
        [1.5] * 2,
        [2] * 2,
        [1.25] * 2,
        [1.125] * 2,
    ]
    assert axes.get_ylabel() == "time, x plain, compiled"
    assert figure.get_suptitle() == "Forward and backward of 4 blocks, bfloat16, NVIDIA X"


def test_layer_plot_has_a_panel_per_operator_and_a_bar_per_variant():
    figure = speed_plots.speed_plot(layers())
    assert [axes.get_title() for axes in figure.axes] == ["tanh-cos", "seg-sqcos"]
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["N512 C64 32x32", "N256 C64 56x56"]
        heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
        assert heights == [[1.25, 1.25], [1.125, 1.125], [3, 3], [2, 2]]
        assert axes.get_ylabel() == "time, x nn.Conv2d"
        assert 1.0 in [line.get_ydata()[0] for line in axes.get_lines()]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(speed_tables.VARIANTS.values())[2:]
    assert figure.get_suptitle() == "Forward and backward of one layer, bfloat16, NVIDIA X"


def test_one_shape_has_one_panel_with_all_operators():
    (axes,) = speed_plots.speed_plot(layers(shapes=SHAPES[:1])).axes
    assert axes.get_title() == "N512 C64 32x32"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["tanh-cos", "seg-sqcos"]


def test_plots_of_networks_have_the_recorded_ratios():
    (axes,) = speed_plots.speed_plot(network()).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["batch 512", "batch 128"]
    assert [bar.get_height() for bar in axes.containers[0]] == [1.2, 1.2]
    (axes,) = speed_plots.speed_plot(inference()).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1.25, 2.5], [1.0, 1.5]]


@pytest.mark.parametrize("record", [layers(), blocks(), network(), inference()], ids=lambda record: record["benchmark"])
def test_plot_is_drawn_from_a_stored_record(record: Row, tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(record))
    drawing.save(speed_plots.speed_plot(json.loads((tmp_path / "record.json").read_text())), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_speed_plot_requires_times():
    record = {**layers(), "results": []}
    with pytest.raises(ValueError, match="the record of 'layers' has no times to draw"):
        speed_plots.speed_plot(record)


@pytest.mark.parametrize(
    ("shape", "text"),
    [("N8xC3x32", "N8 C3 32x32"), ("N8xC3x32x48", "N8 C3 32x48"), ("N8xC3x32xK5", "N8 C3 32x32, 5x5 filters")],
)
def test_spell_formats_shapes(shape: str, text: str):
    assert speed_cells.spell(shape) == text


def test_numbers_have_significant_digits():
    assert [speed_cells.three_digits(ms) for ms in (0.01234, 1.234, 12.34, 123.4)] == [
        "0.012",
        "1.23",
        "12.3",
        "123.4",
    ]
    assert speed_cells.two_digits(None) == ""


HEADS = ["linear", "margin", "sharded", "sampled"]
CLASSES = [1_000, 1_000_000]


def made_row(head: str, classes: int, batch: int, **more: Any) -> dict[str, Any]:
    ms = classes / 100 * (1 + HEADS.index(head))
    row = {"head": head, "classes": classes, "batch": batch, "wrong": None, "failed": None, "skipped": None}
    floors = {"floor_ms": classes / 1000, "floor_mib": classes / 250, "needed_mib": classes / 50}
    training = {"ms": ms, "ms_quartiles": [ms, ms], "rounds": 3, "ratio": 1.0 + HEADS.index(head)}
    return {**row, **floors, "peak_mib": classes / 100, "training": training, **more}


def made_record(batches: tuple[int, ...] = (128,), **more: Any) -> dict[str, Any]:
    results = [made_row(head, classes, batch) for batch in batches for classes in CLASSES for head in HEADS]
    config = {"device": "cuda", "threads": 2, "heads": HEADS, "classes": CLASSES, "batches": list(batches)}
    config |= {"features": 512, "dtype": "float32", "margin": "arcface", "sample": 0.1}
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    record = {"benchmark": "heads", "config": config, "environment": environment, "results": results}
    return {**record, "free_gib": 139.0, **more}


def skip(record: dict[str, Any], index: int) -> None:
    row = record["results"][index]
    row["skipped"] = "it does not fit"
    del row["training"], row["peak_mib"]


def test_head_plot_has_time_and_memory_of_each_batch():
    figure = speed_plots.benchmark_plot(made_record((128, 512)))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Time, batch 128", "Memory, batch 128", "Time, batch 512", "Memory, batch 512"]
    time, memory = figure.axes[:2]
    assert {time.get_xscale(), time.get_yscale(), memory.get_xscale(), memory.get_yscale()} == {"log"}
    assert (time.get_ylabel(), memory.get_ylabel()) == ("time of a step, ms", "peak memory, GiB")
    drawn = {line.get_label(): list(line.get_ydata()) for line in memory.lines}
    assert drawn["MarginSoftmax"] == [10 / 1024, 10_000 / 1024]
    assert drawn["free memory"] == [139, 139]
    assert "ShardedMarginSoftmax, 10% sampled" in drawn


def test_skipped_heads_are_drawn_at_their_predicted_memory():
    record = made_record()
    skip(record, 5)
    time, memory = speed_plots.benchmark_plot(record).axes
    (line,) = [line for line in memory.lines if line.get_label() == "margin: does not fit, predicted"]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1_000_000], [20_000 / 1024])
    assert len(next(line for line in time.lines if line.get_label() == "MarginSoftmax").get_xdata()) == 1


def test_plot_of_heads_requires_times():
    record = made_record()
    for index in range(len(record["results"])):
        skip(record, index)
    with pytest.raises(ValueError, match="the record of 'heads' has no times to draw"):
        speed_plots.benchmark_plot(record)


def test_head_table_has_a_row_per_class_count():
    record = made_record()
    skip(record, 5)
    record["results"][6] |= {"failed": "RuntimeError: x"}
    about, _, headings, _, first, second = speed_tables.heads(record).splitlines()
    assert about == "`arcface`, batch 128, 512 features, float32, NVIDIA X, torch 2.11.0:"
    assert headings.startswith("| classes | `nn.Linear`, ms | `MarginSoftmax`, ms | one share, ms | 10% sampled, ms |")
    assert first.startswith("| 1,000 | 10.0 | 20.0 (x 2.00) | 30.0 (x 3.00) | 40.0 (x 4.00) | 1.00 | 0.010 |")
    assert second.startswith("| 1,000,000 | 10000.0 | skipped | failed | 40000.0 (x 4.00) | 1000.0 | 9.8 |  |  | 9.8 |")


@pytest.mark.parametrize(
    ("few", "many", "words"),
    [
        (2.0, 0.5, "saves time from about 32,000 classes on"),
        (10.0, 0.1**0.5, "saves time from about 100,000 classes on"),
        (0.9, 0.5, "saves time from 1,000 classes on, the fewest measured"),
        (0.9, 1.0, "saves no time up to 1,000,000 classes, the most measured"),
    ],
)
def test_terminal_says_from_how_many_classes_on_sampling_saves_time(few: float, many: float, words: str):
    """Ratios of 2 and 1/2 cross 1 in the middle of the logarithms."""
    record = made_record()
    for row in record["results"]:
        ratio = (few if row["classes"] == 1_000 else many) if row["head"] == "sampled" else 1.0
        row["training"]["ms"] = ratio * row["classes"]
    (table,) = speed_tables.terminal_tables(record)
    assert table.notes[1:] == [f"sampling 10% of the classes {words}"]
    skip(record, 3)
    skip(record, 7)
    assert speed_tables.terminal_tables(record)[0].notes[1:] == []


def test_estimate_is_followed_by_its_assumptions():
    row = {"head": "sharded", "classes": 10_000_000, "gpus": 100, "joint_batch": 12_800, "memory_gib": 3.14}
    row |= {"compute_ms": 1234.5, "gathered_bytes": 26_000_000, "reduced_bytes": 52_000_000}
    row |= {"link_ms": 1.9, "total_ms": 1236.4}
    large = {**row, "classes": 10**9, "memory_gib": 140.0}
    text = speed_tables.heads(made_record(estimates={"assumptions": ["One.", "Two."], "rows": [row, large]}))
    assert "Estimate for 100 GPUs with a joint batch of 12,800, per GPU:" in text
    assert "| 10,000,000 | sharded | 3.1 | 1,234.5 | 26 | 52 | 1.9 | 1,236.4 |" in text
    assert "| 1,000,000,000 | sharded | 140.0 (too much) |" in text
    assert text.endswith("- One.\n- Two.")
