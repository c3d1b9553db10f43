"""Records of heads as a picture and as Markdown tables, from the record alone."""

from typing import Any

import pytest

from dcnet.report import head_tables, plots

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


def test_the_picture_has_time_and_memory_of_each_batch_by_class_count():
    figure = plots.benchmark(made_record((128, 512)))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Time, batch 128", "Memory, batch 128", "Time, batch 512", "Memory, batch 512"]
    time, memory = figure.axes[:2]
    assert {time.get_xscale(), time.get_yscale(), memory.get_xscale(), memory.get_yscale()} == {"log"}
    assert (time.get_ylabel(), memory.get_ylabel()) == ("time of a step, ms", "peak memory, GiB")
    drawn = {line.get_label(): list(line.get_ydata()) for line in memory.lines}
    assert drawn["MarginSoftmax"] == [10 / 1024, 10_000 / 1024]
    assert drawn["memory that was free"] == [139, 139]
    assert "ShardedMarginSoftmax, 10% sampled" in drawn


def test_what_did_not_fit_is_drawn_where_it_was_predicted():
    record = made_record()
    skip(record, 5)
    time, memory = plots.benchmark(record).axes
    (line,) = [line for line in memory.lines if line.get_label() == "margin: does not fit, predicted"]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1_000_000], [20_000 / 1024])
    assert len(next(line for line in time.lines if line.get_label() == "MarginSoftmax").get_xdata()) == 1


def test_a_record_without_times_is_no_picture():
    record = made_record()
    for index in range(len(record["results"])):
        skip(record, index)
    with pytest.raises(ValueError, match="nothing was timed in this record of 'heads'"):
        plots.benchmark(record)


def test_the_table_has_a_row_for_each_class_count():
    record = made_record()
    skip(record, 5)
    record["results"][6] |= {"failed": "RuntimeError: x"}
    about, _, headings, _, first, second = head_tables.heads(record).splitlines()
    assert about == "`arcface`, batch 128, 512 features, float32, NVIDIA X, torch 2.11.0:"
    assert headings.startswith("| classes | `nn.Linear`, ms | `MarginSoftmax`, ms | one share, ms | 10% sampled, ms |")
    assert first.startswith("| 1,000 | 10.0 | 20.0 (x 2.00) | 30.0 (x 3.00) | 40.0 (x 4.00) | 1.00 | 0.010 |")
    assert second.startswith("| 1,000,000 | 10000.0 | skipped | failed | 40000.0 (x 4.00) | 1000.0 | 9.8 |  |  | 9.8 |")


def test_the_estimate_follows_with_its_assumptions():
    row = {"head": "sharded", "classes": 10_000_000, "gpus": 100, "joint_batch": 12_800, "memory_gib": 3.14}
    row |= {"compute_ms": 1234.5, "gathered_bytes": 26_000_000, "reduced_bytes": 52_000_000}
    row |= {"link_ms": 1.9, "total_ms": 1236.4}
    large = {**row, "classes": 10**9, "memory_gib": 140.0}
    text = head_tables.heads(made_record(estimates={"assumptions": ["One.", "Two."], "rows": [row, large]}))
    assert "Estimate for 100 of them, with 12,800 samples together; each has:" in text
    assert "| 10,000,000 | sharded | 3.1 | 1,234.5 | 26 | 52 | 1.9 | 1,236.4 |" in text
    assert "| 1,000,000,000 | sharded | 140.0 (too much) |" in text
    assert text.endswith("- One.\n- Two.")
