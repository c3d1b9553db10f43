"""Tables of training steps and inference, and the fastest way to run each network."""

from helpers.speed_records import inference, network

from dcnet.report import network_tables


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
    record = inference(compiled=True)
    for row in record["results"]:
        # Timed in turns with a plain network that was not compiled.
        row["forward"]["ratio"] = 0.1
    assert "| `cnn9` | `tanh-cos` | compiled | 10.0 | 6.00 | 0.60 | 1.50 |" in network_tables.inference(record)
