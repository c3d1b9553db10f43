"""Estimates of sharded heads on many GPUs: lines through measurements, memory and transferred bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_bench import bench

from dcnet.bench.cluster_estimate import COLLECTIVES, COUNTS, Cluster, Line, Measured, estimate, estimates, line_of
from dcnet.bench.head_steps import Size
from dcnet.bench.meter import MIB

SIZE = Size(classes=0, batch=0, features=512, itemsize=4)
WEIGHTS = 512 * 4


def row(head: str, classes: int, batch: int, ms: float, mib: float | None = 1.0) -> dict[str, Any]:
    return {"head": head, "classes": classes, "batch": batch, "training": {"ms": ms}, "peak_mib": mib}


def rows(head: str, batches: tuple[int, ...] = (128, 512, 1024)) -> list[dict[str, Any]]:
    """Rows with 2 ms plus 1e-6 ms per class and 1e-8 ms per logit, and twice the counted memory."""
    made = []
    for batch in batches:
        for classes in (1_000, 100_000, 1_000_000):
            mib = 2 * Size(classes, batch, 512, 4).needed_bytes(head, 0.1) / MIB
            made.append(row(head, classes, batch, 2 + classes * (1e-6 + 1e-8 * batch), mib))
    return made


def test_line_of_recovers_a_known_line():
    line = line_of(rows("sharded"))
    assert line is not None
    assert [line.fixed, line.per_class, line.per_logit] == pytest.approx([2, 1e-6, 1e-8])
    assert line.at(10_000_000, 12_800) == pytest.approx(2 + 10 + 1280)


def test_with_one_batch_size_the_whole_slope_is_per_logit():
    line = line_of(rows("sharded", (128,)))
    assert line is not None
    assert line.per_class == 0
    assert line.per_logit == pytest.approx((1e-6 + 1.28e-6) / 128)


def test_one_number_of_classes_gives_no_line():
    alone = [row("sharded", 1000, 128, 1.0)]
    assert line_of(alone) is None
    assert estimates(alone, Cluster(100, 50), SIZE, 0.1) == {"assumptions": [], "rows": []}
    assert estimates([], Cluster(100, 50), SIZE, 0.1) == {"assumptions": [], "rows": []}


def test_decreasing_times_give_a_slope_of_zero():
    assert line_of([row("sharded", 1000, 128, 3.0), row("sharded", 2000, 128, 1.0)]) == Line(3.0, 0.0, 0.0)


def test_an_estimate_by_hand():
    cluster = Cluster(100, gb_per_s=50, start_ms=0.1)
    made = estimate(Measured("sharded", 1.0, Line(2.0, 1e-3, 1e-6), 1.5), 10_000_050, cluster, 128, SIZE)
    assert (made.classes_per_gpu, made.joint_batch) == (100_001, 12_800)
    assert made.compute_ms == pytest.approx(2 + 100_001 * (1e-3 + 1e-6 * 12_800))
    # Weights, and three and a quarter copies of the logits of all samples, which weigh 25 times as much.
    assert made.memory_gib == pytest.approx(1.5 * 100_001 * WEIGHTS * (1 + 3.25 * 25) / 2**30)
    assert made.gathered_bytes == 99 * 128 * (WEIGHTS + 8)
    assert made.reduced_bytes == 2 * 99 * 128 * 4 * 516
    passed = made.gathered_bytes + made.reduced_bytes
    assert made.link_ms == pytest.approx(1000 * passed / 50e9 + COLLECTIVES * 0.1)
    assert made.total_ms == pytest.approx(made.compute_ms + made.link_ms)
    assert made.unsharded_link_ms == pytest.approx(1000 * 2 * 0.99 * 10_000_050 * WEIGHTS / 50e9 + 0.1)


def test_one_gpu_sends_nothing():
    made = estimate(Measured("sharded", 1.0, Line(1.0, 0.0, 0.0), 1.0), 1000, Cluster(1, 50), 128, SIZE)
    assert made.link_ms == made.unsharded_link_ms == made.reduced_bytes == made.gathered_bytes == 0
    assert made.total_ms == made.compute_ms == 1


@pytest.mark.parametrize("gpus", [2, 4, 100])
def test_bytes_of_a_ring_all_reduce(gpus: int):
    assert Cluster(gpus, 50).ring_bytes(100 * gpus) == 2 * 100 * (gpus - 1)


def test_estimates_are_for_sharded_and_sampled_heads():
    results = [made for head in ("linear", "margin", "sharded", "sampled") for made in rows(head)]
    results += [{"head": "sharded", "classes": 10**9, "batch": 128, "skipped": "it needs about ..."}]
    found = estimates(results, Cluster(100, 25), SIZE, 0.1)
    assert [(made["head"], made["classes"]) for made in found["rows"]] == [
        (head, count) for head in ("sharded", "sampled") for count in COUNTS
    ]
    sharded, sampled = found["rows"][0], found["rows"][3]
    assert sharded["memory_gib"] == pytest.approx(2 * 100_000 * WEIGHTS * (1 + 3.25 * 25) / 2**30)
    assert sampled["memory_gib"] == pytest.approx(2 * 100_000 * WEIGHTS * (1 + 0.1 * (1 + 3.25 * 25)) / 2**30)
    text = " ".join(found["assumptions"])
    for stated in ("batches of 512 and 1024", "100 GPUs", "128 samples", "25 GB/s", "0.05 ms", "momentum", "2.00"):
        assert stated in text


def test_unknown_memory_gives_no_estimate():
    unknown = [row("sharded", classes, 128, 1.0, None) for classes in (1000, 2000)]
    assert estimates(unknown, Cluster(100, 50), SIZE, 0.1)["rows"] == []


def test_gpus_and_link_options_give_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    given = ("--heads", "sharded", "--classes", "1000", "20000", "--gpus", "8", "--link", "900")
    assert bench("heads", *given, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    assert [made["gpus"] for made in record["estimates"]["rows"]] == [8, 8, 8]
    assert record["config"]["link_gb_per_s"] == 900
    output = capsys.readouterr().out
    assert "Estimate for 8 GPUs with a joint batch of 64" in output
    assert "only batches of 8 were measured, so b is the whole slope, which is too much" in " ".join(output.split())
