"""Measurements on a GPU; skipped on machines without one."""

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_bench import bench

from dcnet.bench.meter import meter_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_replay_runs_the_call_and_returns_its_time():
    meter = meter_of("cuda")
    x, total = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    replay = meter.clocks[0].start(lambda: total.add_(x))
    total.zero_()
    assert 0 < replay() < 10
    torch.cuda.synchronize()
    assert total[0].item() == replay.count  # type: ignore[attr-defined]


def test_gradients_can_be_captured_in_a_graph():
    meter = meter_of("cuda")
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    replay = meter.clocks[0].start(lambda: torch.autograd.grad(x.square().sum(), x))
    replay()
    torch.cuda.synchronize()
    assert torch.equal(replay.result[0], 2 * x)  # type: ignore[attr-defined]


def test_launches_count_kernels_copies_and_fills():
    meter = meter_of("cuda")
    x, y = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
    assert meter.launches(lambda: x.add_(1)) == 1
    assert meter.launches(lambda: (x.add_(1), y.copy_(x), x.zero_())) == 3


def test_peak_memory_of_a_call():
    """Other memory is read after the call, since the measurement itself collects garbage of earlier tests."""
    meter = meter_of("cuda")
    meter.free()
    peak = meter.memory_mib(lambda: None, lambda: torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda"))
    assert peak - meter.allocated_mib() == pytest.approx(64, abs=1)


def test_ceilings_of_a_gpu():
    ceilings = meter_of("cuda").ceilings(torch.bfloat16)
    assert ceilings.bytes_per_s > 1e11
    assert ceilings.flops_per_s > 1e12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_layers_on_a_gpu(dtype: str, tmp_path: Path):
    shape, file = ("--shapes", "N8xC16x16"), tmp_path / "record.json"
    assert bench("layers", "--device", "cuda", *shape, "--dtype", dtype, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    conv, eager, _ = record["results"]
    assert {"ms", "host_ms", "launches", "launches_ratio"} <= set(eager["training"])
    assert conv["forward"]["launches"] >= 1
    assert eager["peak_mib"] > 0
    assert record["environment"]["gpu"]


def test_blocks_on_a_gpu(tmp_path: Path):
    file = tmp_path / "record.json"
    assert bench("blocks", "--device", "cuda", "--shapes", "N8xC16x16", "--json", str(file)) == 0
    rows = {row["variant"]: row for row in json.loads(file.read_text())["results"]}
    assert rows["fused"]["fused_blocks"] == 2
    assert rows["fused"]["training"]["launches"] < rows["unfused"]["training"]["launches"]
    assert rows["plain-compiled"]["training"]["ratio"] == rows["plain-compiled"]["memory_ratio"] == 1


def test_networks_on_a_gpu(tmp_path: Path):
    file = tmp_path / "record.json"
    assert bench("network", "--device", "cuda", "--mode", "eager", "graph", "--batch", "8", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["mode"] for row in rows] == ["eager", "eager", "graph", "graph"]
    assert all(row["training"]["ms"] > 0 and row["peak_mib"] > 0 for row in rows)


def test_inference_on_a_gpu(tmp_path: Path):
    file = tmp_path / "record.json"
    assert bench("inference", "--device", "cuda", "--batch", "8", "--json", str(file)) == 0
    assert all(row["forward"]["ms"] > 0 for row in json.loads(file.read_text())["results"])
