"""Tables of training steps and inference, and the fastest way to run each network."""

from typing import Any

import pytest
from helpers.speed_records import inference, network, step

from dcnet.report import network_tables, speed_plots


def test_training_steps_have_a_row_for_each_batch_and_mode():
    table = network_tables.network(network())
    assert table.startswith("Training step of resnet32, width 1, autocast, NVIDIA X, torch 2.11.0:\n")
    assert "| `tanh-cos` | 512 | graph | 10.0 | 12.0 | 1.20 | 51,200 | 1.50 |" in table
    assert "| `tanh-cos` | 128 | graph |" in table


def test_inference_compares_folded_with_trained_and_with_plain():
    table = network_tables.inference(inference())
    assert table.startswith(
        "Forward pass in evaluation, batch 32, width 0.5, float32, channels last, CPU, 1 thread, torch 2.13.0:\n"
    )
    assert "| `cnn9` | `conv` | eager | 5.00 | 4.00 | 0.80 | 1.00 |" in table
    assert "| `cnn9` | `tanh-cos` | eager | 10.0 | 6.00 | 0.60 | 1.50 |" in table


def test_inference_compares_compiled_with_compiled():
    record = inference(True)
    for row in record["results"]:
        # Timed in turns with a plain network that was not compiled.
        row["forward"]["ratio"] = 0.1
    assert "| `cnn9` | `tanh-cos` | compiled | 10.0 | 6.00 | 0.60 | 1.50 |" in network_tables.inference(record)


def test_steps_are_compared_with_the_compiled_plain_network():
    table = network_tables.network(network("compile"))
    assert "| plain, ms | decoupled, ms | ratio | x plain compiled | images/s |" in table
    assert "| `tanh-cos` | 512 | graph | 10.0 | 12.0 | 1.20 | 1.50 | 51,200 | 1.50 |" in table
    assert "| `tanh-cos` | 512 | compile | 8.00 | 10.0 | 1.25 | 1.25 | 51,200 | 1.50 |" in table


def test_a_batch_without_compiled_steps_has_an_empty_cell():
    record = network("compile")
    record["results"] = [row for row in record["results"] if (row["mode"], row["batch"]) != ("compile", 128)]
    table = network_tables.network(record)
    assert "| `tanh-cos` | 512 | graph | 10.0 | 12.0 | 1.20 | 1.50 |" in table
    assert "| `tanh-cos` | 128 | graph | 10.0 | 12.0 | 1.20 |  |" in table


def test_without_compiled_steps_there_is_no_such_column():
    """A compiled plain network that failed counts as not measured, even if it failed after some measurements."""
    record = network("compile")
    for row in record["results"]:
        if row["mode"] == "compile":
            row["failed"] = "RuntimeError: no compiler"
            if row["operator"] != "conv":
                del row["training"]
    table = network_tables.network(record)
    assert "x plain compiled" not in table
    assert table.count(", ratio 1.20. The compiled plain network was not timed.") == 2
    assert "| `tanh-cos` | 512 | graph | 10.0 | 12.0 | 1.20 | 51,200 | 1.50 |" in table
    assert "| `tanh-cos` | 512 | compile | failed | failed | failed | failed | failed |" in table


def test_a_note_says_the_fastest_of_both():
    record = network("compile")
    record["results"] += [step("eager", 512, "conv", 30.0, 1.0), step("eager", 512, "tanh-cos", 7.5, 0.25)]
    assert network_tables.network(record).splitlines()[-2:] == [
        "- Fastest of both: batch 512: 7.50 ms (tanh-cos, eager) and 8.00 ms (plain, compile), ratio 0.94.",
        "- Fastest of both: batch 128: 10.0 ms (tanh-cos, compile) and 8.00 ms (plain, compile), ratio 1.25.",
    ]
    assert len(network_tables.network_table(record).notes) == 2


def test_fastest_of_steps_has_modes_times_and_ratios():
    (first, second) = network_tables.STEPS.fastest(network("compile")["results"])
    assert first == {
        "model": "resnet32",
        "batch": 512,
        "operator": "tanh-cos",
        "decoupled": {"mode": "compile", "ms": 10.0},
        "plain": {"mode": "compile", "ms": 8.0},
        "ratio": 1.25,
        "x_plain_compiled": {"graph": 1.5, "compile": 1.25},
    }
    assert second["batch"] == 128


def test_fastest_needs_both_networks():
    rows = network()["results"]
    (found,) = network_tables.STEPS.fastest([row for row in rows if (row["batch"], row["operator"]) != (128, "conv")])
    assert found["batch"] == 512
    assert found["x_plain_compiled"] == {"graph": None}


@pytest.mark.parametrize(("config", "unfused"), [({}, False), ({"fuse": True}, False), ({"fuse": False}, True)])
def test_the_title_says_if_blocks_are_not_fused(config: dict[str, Any], unfused: bool):
    record = network()
    record["config"] |= config
    title = network_tables.network(record).splitlines()[0]
    assert ("autocast, not fused, NVIDIA X" in title) == unfused


def test_inference_is_compared_with_the_folded_compiled_plain_network():
    table = network_tables.inference(inference(False, True))
    assert "| folded / folded plain | x plain folded compiled |" in table
    assert "| `cnn9` | `tanh-cos` | eager | 10.0 | 6.00 | 0.60 | 1.50 | 3.00 |" in table
    assert "| `cnn9` | `tanh-cos` | compiled | 5.00 | 3.00 | 0.60 | 1.50 | 1.50 |" in table
    assert table.endswith(
        "- Fastest of both: cnn9: 3.00 ms (tanh-cos, folded, compiled) and 2.00 ms (plain, folded, compiled), "
        "ratio 1.50."
    )
    eager = network_tables.inference(inference())
    assert "x plain folded compiled" not in eager
    assert "Fastest" not in eager


def several() -> dict[str, Any]:
    """Two networks of timm; the second one takes twice the time."""
    record = network("compile")
    rows = [row for row in record["results"] if row["batch"] == 128]
    second = [
        {**row, "model": "timm:b", "training": {**row["training"], "ms": 2 * row["training"]["ms"]}} for row in rows
    ]
    record["results"] = [*({**row, "model": "timm:a"} for row in rows), *second]
    del record["config"]["model"]
    record["config"] |= {"models": ["timm:a", "timm:b"], "size": 224}
    return record


def test_several_networks_have_a_column_of_names():
    table = network_tables.network(several())
    assert table.startswith("Training step, width 1, 224x224 pixels, autocast, NVIDIA X, torch 2.11.0:\n")
    assert "| network | operator | batch | mode | plain, ms |" in table
    assert "| `timm:a` | `tanh-cos` | 128 | graph | 10.0 | 12.0 | 1.20 | 1.50 | 51,200 | 1.50 |" in table
    assert "| `timm:b` | `tanh-cos` | 128 | graph | 20.0 | 24.0 | 1.20 | 1.50 | 51,200 | 1.50 |" in table
    end = "20.0 ms (tanh-cos, compile) and 16.0 ms (plain, compile), ratio 1.25."
    assert table.endswith(f"- Fastest of both: timm:b, batch 128: {end}")


def test_skipped_networks_are_a_note():
    record = several()
    for row in record["results"]:
        if (row["model"], row["mode"]) == ("timm:b", "compile"):
            del row["training"]
            row["skipped"] = "the limit of 1 minutes had passed"
    table = network_tables.network(record)
    assert "| `timm:b` | `tanh-cos` | 128 | compile |" not in table
    assert table.endswith("- Not timed: timm:b (compile, batch 128).")
    assert "| `timm:b` | `tanh-cos` | 128 | graph | 20.0 | 24.0 | 1.20 |  |" in table


def test_skipped_networks_are_grouped_by_mode():
    record = several()
    for row in record["results"]:
        if row["model"] == "timm:b" or row["mode"] == "compile":
            del row["training"]
            row["skipped"] = "the limit of 1 minutes had passed"
    skipped = "timm:a, timm:b (compile, batch 128); timm:b (graph, batch 128)"
    assert network_tables.network(record).endswith(f"- Not timed: {skipped}.")


def test_the_plot_of_several_networks_has_a_group_per_network():
    figure = speed_plots.speed_plot(several())
    assert [axes.get_title() for axes in figure.axes] == ["graph", "compile"]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["a, batch 128", "b, batch 128"]
    assert figure.get_suptitle() == "Training step, autocast, NVIDIA X"
